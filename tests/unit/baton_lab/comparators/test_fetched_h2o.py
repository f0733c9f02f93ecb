"""Heavy hitters on the device: places hold just what is kept, with the CPU's logits bit by bit."""

import pytest
import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.arena import WrongMemoryError
from baton.types import TokenRange
from baton_lab.comparators.fetched_h2o import FetchedH2oResidency, KeptRow
from baton_lab.comparators.h2o import H2oResidency
from baton_lab.comparators.heavy_hitters import HeavyBudget
from tests.support.engines.devices import PoisonedCpu, on_emulated
from tests.support.engines.generation import prompt
from tests.support.engines.selective import TOKENS, Bench, MakePolicy
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder

pytestmark = needs_rows
PLAIN = random_decoder(num_layers=4)
CPU = Decoder(PLAIN.config, PLAIN.weights, device=PoisonedCpu())
PROMPTS = [prompt(length, seed) for seed, length in enumerate((60, 3, 90))]
BUDGETS = [HeavyBudget(0.1, 0.1), HeavyBudget(0.0, 0.05), HeavyBudget(0.3, 0.001), HeavyBudget(1.0, 1.0)]


def h2o(decoder: Decoder, budget: HeavyBudget) -> MakePolicy:
    if decoder.device.is_home:
        return lambda shape, make: H2oResidency(shape, make, decoder, budget)
    return lambda shape, make: FetchedH2oResidency(shape, decoder, budget)


def row_of(bench: Bench, slot: int) -> KeptRow:
    row = bench.residency._rows[slot]  # type: ignore[attr-defined]
    assert isinstance(row, KeptRow)
    return row


def check_places(row: KeptRow) -> None:
    """Each kv head's places hold the KV of the tokens that it keeps, and no place is taken twice."""
    for layer in (2, 3):
        hitters, places_P2GH = row.placed(layer)
        for head, (positions_K, places_K) in enumerate(zip(hitters.positions_GK, hitters.places_GK, strict=True)):
            kept = places_K.tolist()
            assert len(set(kept)) == len(kept)
            assert row.kept.own_place not in kept
            for position, place in zip(positions_K.tolist(), kept, strict=True):
                home_2H = row.kv(layer, TokenRange(position, position + 1))[0, :, head]
                assert torch.equal(places_P2GH[place, :, head], home_2H)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_places_hold_what_is_kept(budget: HeavyBudget) -> None:
    there = on_emulated(PLAIN)
    expected = Bench.of(CPU, h2o(CPU, budget), PROMPTS, 60)
    bench = Bench.of(there, h2o(there, budget), PROMPTS, 60)
    for step, (got, wanted) in enumerate(zip(bench.turns(50), expected.turns(50), strict=True)):
        assert torch.equal(got, wanted)
        for slot in range(len(PROMPTS)) if step % 7 == 0 else ():
            check_places(row_of(bench, slot))
    for slot in range(len(PROMPTS)):
        held, bound = row_of(bench, slot).num_bytes, bench.residency.bytes_for(bench.lengths[slot])
        assert (held.home, held.device <= bound.device) == (bound.home, True)
    expected.close()
    bench.close()


def test_a_copy_goes_on_as_its_source() -> None:
    there = on_emulated(PLAIN)
    bench = Bench.of(there, h2o(there, BUDGETS[0]), [prompt(60), prompt(60)], 50)
    bench.copy(0, 1)
    for step in range(12):
        logits_BV, _ = bench.run(dict.fromkeys((0, 1), TOKENS[step : step + 1]))
        assert torch.equal(logits_BV[0], logits_BV[1])
    check_places(row_of(bench, 1))
    bench.close()


def test_the_device_holds_what_is_kept_and_two_layers() -> None:
    there = on_emulated(random_decoder(num_layers=6, head_dim=64))
    bench = Bench.of(there, h2o(there, BUDGETS[0]), [prompt(400)], 20)
    bench.run({0: TOKENS[:1]})
    row = row_of(bench, 0)
    assert row.kept.num_bytes < 0.25 * row.others.num_bytes
    assert there.device.memory_use.num_bytes <= row.num_bytes.device + bench.residency.scratch_bytes
    bench.close()


def test_a_planted_read_of_home_memory_is_found() -> None:
    there = on_emulated(PLAIN)
    bench = Bench.of(there, h2o(there, BUDGETS[0]), PROMPTS, 50)
    bench.run({0: TOKENS[:1]})
    row = row_of(bench, 0)
    row.kept._kv = row.others
    with pytest.raises(WrongMemoryError, match="are host memory"):
        bench.run({0: TOKENS[:1]})
    bench.residency.close()

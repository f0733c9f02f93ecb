"""A window on the device: the CPU's logits bit by bit, and over the link no more than new tokens."""

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.kv.arena import WrongMemoryError
from baton.types import TokenRange
from baton_lab.comparators.fetched_window import FetchedWindowResidency
from baton_lab.comparators.window import WindowResidency
from tests.support.engines.devices import PoisonedCpu, on_emulated
from tests.support.engines.generation import prompt
from tests.support.engines.selective import TOKENS, Bench, MakePolicy
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder

pytestmark = needs_rows
FEW = Selection(3.0, 0.1, 2, 3, free_keys=6)
PROMPTS = [prompt(length, seed) for seed, length in enumerate((60, 1, 90))]
NUM_SINGLE = 80
"""Steps of one token before one of several."""
PLAIN = random_decoder(num_layers=4)
CPU = Decoder(PLAIN.config, PLAIN.weights, device=PoisonedCpu())


def window(decoder: Decoder, selection: Selection = FEW) -> MakePolicy:
    if decoder.device.is_home:
        return lambda shape, make: WindowResidency(shape, make, selection)
    return lambda shape, make: FetchedWindowResidency(shape, decoder.device, selection)


def run(bench: Bench, num_steps: int) -> list[Tensor]:
    """Logits of steps in which rows take turns to be there; one takes several tokens at once."""
    found = []
    for step in range(num_steps):
        slots = [slot for slot in range(len(PROMPTS)) if (step + slot) % 4]
        found.append(bench.run(dict.fromkeys(slots, TOKENS[step : step + 1 + 4 * (step == NUM_SINGLE)]))[0])
    return found


@pytest.mark.parametrize("selection", [FEW, Selection(3.0, 0.3, 0, 1), Selection(3.0, 1.0, 4, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_those_of_the_cpu(selection: Selection, dtype: str) -> None:
    """Runs so many steps that the window moves along in its room, and is fetched anew behind several tokens."""
    plain = random_decoder(num_layers=4, dtype=dtype, head_dim=64)
    cpu = Decoder(plain.config, plain.weights, device=PoisonedCpu())
    expected = Bench.of(cpu, window(cpu, selection), PROMPTS, 150)
    there = on_emulated(plain)
    bench = Bench.of(there, window(there, selection), PROMPTS, 150)
    steps = zip(run(bench, 100), run(expected, 100), strict=True)
    for number, (got, wanted) in enumerate(steps):
        if number < NUM_SINGLE:
            assert torch.equal(got, wanted)
        else:  # several tokens' attention is merged of pieces
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 if dtype == "float32" else 0.3)
    expected.close()
    bench.close()


def test_a_step_fetches_nothing_that_it_has() -> None:
    decoder = on_emulated(PLAIN)
    bench, link = Bench.of(decoder, window(decoder), PROMPTS, 150), decoder.device.link
    fed = dict.fromkeys(range(len(PROMPTS)), TOKENS[:1])
    for step in range(60):
        before = link.num_bytes_fetched, link.num_bytes_stored, bench.residency.num_link_bytes
        bench.run(fed)
        fetched, stored = link.num_bytes_fetched - before[0], link.num_bytes_stored - before[1]
        assert stored == len(PROMPTS) * 2 * PLAIN.layout.row_bytes
        assert (fetched == 0) == (step > 0)
        assert bench.residency.num_link_bytes - before[2] == fetched + stored
    bench.close()


def test_the_device_holds_the_window_and_two_layers() -> None:
    decoder = on_emulated(random_decoder(num_layers=4, head_dim=64))
    bench = Bench.of(decoder, window(decoder), [prompt(400)], 100)
    bench.run({0: TOKENS[:1]})
    row = bench.residency._rows[0]  # type: ignore[attr-defined]
    held, bound = row.num_bytes, bench.residency.bytes_for(401)
    assert (held.home, held.device) == (bound.home, bound.device)
    whole = row.whole.bytes_for(401)
    assert row.num_bytes.device - whole < 0.3 * whole
    bench.close()


def test_a_planted_read_of_home_memory_is_found() -> None:
    decoder = on_emulated(PLAIN)
    bench = Bench.of(decoder, window(decoder), PROMPTS, 50)
    row = bench.residency._rows[0]  # type: ignore[attr-defined]
    row.window._kv = row.others
    with pytest.raises(WrongMemoryError, match="are host memory"):
        bench.run({0: TOKENS[:1]})


def test_a_copy_of_a_row_fetches_its_own_window() -> None:
    decoder = on_emulated(PLAIN)
    bench = Bench.of(decoder, window(decoder), [prompt(60), prompt(60)], 50)
    for step in range(5):
        bench.run({0: TOKENS[step : step + 1]})
    bench.copy(0, 1)
    for step in range(9):
        logits_BV, _ = bench.run(dict.fromkeys((0, 1), TOKENS[step : step + 1]))
        assert torch.equal(logits_BV[0], logits_BV[1])
    assert bench.residency._rows[1].tokens == TokenRange(0, 60 + 50)  # type: ignore[attr-defined]
    bench.close()

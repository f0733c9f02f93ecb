"""Places for picks by operations on tensors: every pick has the slot that holds its key, and pools keep to limits."""

from dataclasses import replace

import pytest
import torch

from baton.errors import ConfigError
from baton.modeling.forward.decoder import Decoder
from generate_workers.residency.fetched.infinigen import FetchedInfinigenResidency
from generate_workers.residency.fetched.tensor_keys import _into_slots
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.pool import PoolSize
from tests.support.engines.devices import TensorDevice
from tests.support.engines.infinigen import SOME, KnownSource, prepared
from tests.support.models.tiny_models import random_decoder

B, G, C, NUM_KEYS = 2, 3, 7, 40
PLAIN = random_decoder(num_layers=5)


def random_picks(generator: torch.Generator, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending picks of each list, and which entries are picks: at most C."""
    weights = torch.rand(B, G, NUM_KEYS, generator=generator)
    keys_BGK = weights.argsort(2)[:, :, :most].sort(2).values.int()
    num_BG1 = torch.randint(0, most + 1, (B, G, 1), generator=generator)
    return keys_BGK, torch.arange(most) < num_BG1


@pytest.mark.parametrize("most", [1, 4, C])
def test_every_pick_has_a_slot_of_its_own_that_holds_its_key(most: int) -> None:
    generator = torch.Generator().manual_seed(most)
    held_BGC = torch.full((B, G, C), -1, dtype=torch.int32)
    turn_BG1 = torch.zeros(B, G, 1, dtype=torch.int32)
    num_hot = 0
    for _ in range(200):
        before = held_BGC.clone()
        keys_BGK, is_pick_BGK = random_picks(generator, most)
        slots_BGK, is_missing_BGK = _into_slots(keys_BGK, is_pick_BGK, held_BGC, turn_BG1)
        was_there = (keys_BGK.unsqueeze(3) == before.unsqueeze(2)).any(3)
        assert torch.equal(is_missing_BGK, is_pick_BGK & ~was_there)
        assert torch.equal(held_BGC.gather(2, slots_BGK)[is_pick_BGK], keys_BGK[is_pick_BGK])
        changed = (held_BGC != before).sum(2)
        assert torch.equal(changed, is_missing_BGK.sum(2))
        for slots, is_pick in zip(slots_BGK.flatten(0, 1), is_pick_BGK.flatten(0, 1), strict=True):
            assert len(set(slots[is_pick].tolist())) == int(is_pick.sum())
        num_hot += int((is_pick_BGK & was_there).sum())
    assert num_hot > 0


def test_slots_are_given_in_turn() -> None:
    """A key stays until all other slots were given."""
    held_BGC = torch.full((1, 1, 4), -1, dtype=torch.int32)
    turn_BG1 = torch.zeros(1, 1, 1, dtype=torch.int32)
    is_pick = torch.ones(1, 1, 1, dtype=torch.bool)
    slots = [
        int(_into_slots(torch.tensor([[[key]]]).int(), is_pick, held_BGC, turn_BG1)[0]) for key in (9, 3, 5, 9, 1, 2)
    ]
    assert slots == [0, 1, 2, 0, 3, 0]
    assert held_BGC.tolist() == [[[2, 3, 5, 1]]]


def on_tensors(*, has_triton: bool = True) -> Decoder:
    """A decoder on a device that stands for a GPU, which runs nothing here."""
    made = Decoder(PLAIN.config, PLAIN.weights, device=TensorDevice())
    made.has_triton_rows = has_triton
    return made


def shape(num_slots: int = 4) -> KvShape:
    return KvShape(PLAIN.layout, PLAIN.config.windows, num_slots, 64)


def made_with(device_bytes: int | None) -> FetchedInfinigenResidency:
    decoder = on_tensors()
    source = KnownSource(decoder, found=prepared(SOME, decoder=decoder), device_bytes=device_bytes)
    made = make_residency("infinigen", shape(), decoder.device, source)
    assert isinstance(made, FetchedInfinigenResidency)
    return made


@pytest.mark.parametrize("part", [1.0, 0.95, 0.5, 0.3])
def test_pools_take_no_more_than_the_devices_memory(part: float) -> None:
    roomy = made_with(None)
    each = roomy.bytes_for(64).device
    limit = roomy.scratch_bytes + int(part * 4 * each)
    found = made_with(limit)
    row = found._rows[0]
    pools = [row.whole.memory.pool, row.hot.memory.pool, row.partial.memory.pool]  # type: ignore[attr-defined]
    (num_rows,) = {pool.num_pages for pool in pools}
    pool_bytes = sum(pool.memory.data_LPS2GH.nbytes for pool in pools)
    records = num_rows * (found.bytes_for(64).device - sum(pool.page_bytes for pool in pools))
    assert found.scratch_bytes + pool_bytes + records <= limit
    assert num_rows == min((limit - found.scratch_bytes) // found.bytes_for(64).device, 4) > 0
    assert (found.num_areas, num_rows) == ((3, 4) if part == 1.0 else (2, num_rows))


def test_a_row_that_ends_leaves_its_memory_to_the_next() -> None:
    found = made_with(None)
    for _ in range(3):
        rows = [found._rows[slot] for slot in range(4)]
        for row in rows:
            row.open(10, 64)
            assert row.num_bytes.device == found.bytes_for(64).device
        for row in rows:
            row.release()
            assert row.num_bytes.device == 0


def test_what_a_gpu_cannot_do_is_refused_in_one_line() -> None:
    decoder = on_tensors(has_triton=False)
    source = KnownSource(decoder, found=prepared(SOME, decoder=decoder))
    with pytest.raises(ConfigError, match="'infinigen' is not supported on device cuda without Triton"):
        make_residency("infinigen", shape(), decoder.device, source)
    decoder = on_tensors()
    source = replace(source, decoder=decoder, pool=PoolSize(24))
    with pytest.raises(ConfigError, match="pool_tokens is not supported on device cuda: leave it at 0"):
        make_residency("infinigen", shape(), decoder.device, source)

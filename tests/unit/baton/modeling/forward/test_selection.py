"""Partial keys: what is written is read, memory is counted to the page, and there is a way without a compiler."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.forward.selection import KeyProjection, PartialKeys, PartialRows, Picks, Selection
from baton.modeling.kernels import native
from baton.modeling.kv.row_memory import PAGE_BYTES

pytestmark = pytest.mark.integration

LAYERS = range(2, 5)
NUM_KV_HEADS = 3
NUM_COLUMNS = 20
BLOCK_BYTES = 16 * NUM_KV_HEADS * NUM_COLUMNS * 2
MAX_TOKENS = 1000
CHOICE = Selection(alpha=4.0, most_share=0.2, num_first=2, num_last=3)


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the kernel, where it can be built, and without it."""
    name: str = request.param
    if name == "torch":
        monkeypatch.setattr(native, "load", lambda: False)
    return name


def empty() -> PartialKeys:
    return PartialKeys(LAYERS, NUM_KV_HEADS, NUM_COLUMNS, MAX_TOKENS)


def random(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, NUM_KV_HEADS, NUM_COLUMNS, generator=torch.Generator().manual_seed(seed))


def whole_numbers(*shape: int) -> Tensor:
    """Whole numbers so small that every sum is exact in fp32."""
    return torch.randint(-15, 16, shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).float()


def pages(num_tokens: int) -> int:
    """Bytes of the pages that so many tokens' partial keys touch in a layer."""
    num_bytes = -(-num_tokens // 16) * BLOCK_BYTES
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def test_what_is_written_is_read_rounded(way: str) -> None:
    keys, k_TGR = empty(), random(70, seed=1)
    for start, end in ((0, 1), (1, 18), (18, 32), (32, 70)):
        keys.write(3, start, k_TGR[start:end])
    keys.write(4, 0, 2 * k_TGR)
    assert torch.equal(keys.read(3, 70), k_TGR.bfloat16())
    assert torch.equal(keys.read(3, 20), k_TGR[:20].bfloat16())
    assert torch.equal(keys.read(4, 70), (2 * k_TGR).bfloat16())
    keys.write(3, 17, -k_TGR[17:18])
    assert torch.equal(keys.read(3, 70)[17], -k_TGR[17].bfloat16())
    assert torch.equal(keys.read(3, 70)[[16, 18]], k_TGR[[16, 18]].bfloat16())


@pytest.mark.parametrize("selects", [True, False], ids=["columns", "product"])
def test_keys_become_partial_as_they_are_kept(way: str, selects: bool) -> None:
    """Those of pushed tokens, and those of a step's rows."""
    k_TGH = whole_numbers(40, NUM_KV_HEADS, 32)
    basis_GHR = torch.eye(32)[:, :NUM_COLUMNS].repeat(NUM_KV_HEADS, 1, 1)
    projection = KeyProjection.of(basis_GHR if selects else whole_numbers(NUM_KV_HEADS, 32, NUM_COLUMNS))
    assert (projection.columns_GR is not None) == selects
    expected_TGR = torch.einsum("tgh,ghr->tgr", k_TGH.double(), projection.basis_GHR.double()).bfloat16()
    one, other = empty(), empty()
    one.write(3, 0, k_TGH[:20], projection)
    one.write(3, 20, k_TGH[20:38], projection)
    rows = PartialRows([one, other], [39, 1])
    rows.append(3, k_TGH[38:], projection)
    assert torch.equal(one.read(3, 39), expected_TGR[:39])
    assert torch.equal(other.read(3, 1), expected_TGR[39:])


def test_a_basis_that_makes_other_partial_keys_is_refused(way: str) -> None:
    keys, k_TGH = empty(), torch.zeros(1, NUM_KV_HEADS, 32)
    for heads, columns in ((NUM_KV_HEADS, NUM_COLUMNS + 1), (NUM_KV_HEADS + 1, NUM_COLUMNS)):
        projection = KeyProjection.of(torch.zeros(heads, 32, columns))
        message = f"the basis has {heads} kv heads and {columns} columns, the partial keys have 3 and 20"
        with pytest.raises(RuntimeError, match=message):
            keys.write(3, 0, k_TGH, projection)
        with pytest.raises(RuntimeError, match=message):
            PartialRows([keys], [1]).append(3, k_TGH, projection)
    with pytest.raises(RuntimeError):
        keys.write(3, 0, torch.zeros(1, NUM_KV_HEADS, 31), KeyProjection.of(torch.zeros(NUM_KV_HEADS, 32, NUM_COLUMNS)))


_THREADS = """
import os, threading
import torch
from baton.modeling.forward.selection import KeyProjection, PartialKeys

def check():
    torch.set_num_threads(1)
    k_TGH, basis_GHR = torch.ones(4000, 3, 64), torch.ones(3, 64, 20)
    keys, projection = PartialKeys(range(1), 3, 20, 4000), KeyProjection.of(basis_GHR)
    torch.set_num_threads(3)
    before = len(os.listdir("/proc/self/task"))
    keys.write(0, 0, k_TGH, projection)
    after = len(os.listdir("/proc/self/task"))
    projection.apply(k_TGH)
    print(after - before, len(os.listdir("/proc/self/task")) - before)

thread = threading.Thread(target=check)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_the_kernel_starts_no_threads() -> None:
    """torch starts threads for a thread that uses it for the first time."""
    if not native.load():
        pytest.skip("needs a C++ compiler")
    run = subprocess.run([sys.executable, "-c", _THREADS], text=True, capture_output=True, timeout=60, check=True)
    by_kernel, by_torch = map(int, run.stdout.split())
    assert by_kernel == 0
    assert by_torch > 0


def test_memory_is_counted_to_the_page_and_given_back_at_once() -> None:
    keys = empty()
    assert (keys.num_bytes, keys.bytes_for(0)) == (0, 0)
    keys.write(2, 0, random(100, seed=1))
    assert keys.num_bytes == pages(100)
    keys.write(2, 100, random(12, seed=2))  # the last block's
    assert keys.num_bytes == pages(100)
    for layer in LAYERS:
        keys.write(layer, 0, random(300, seed=3))
    assert keys.num_bytes == keys.bytes_for(300) == len(LAYERS) * pages(300)
    keys.release()
    assert keys.num_bytes == 0
    assert not keys.read(2, MAX_TOKENS).any()
    keys.release()


def test_steps_take_memory_for_their_new_tokens(way: str) -> None:
    one, other = empty(), empty()
    for layer in LAYERS:
        one.write(layer, 0, random(34, seed=1))
        other.write(layer, 0, random(0, seed=1))
    rows = PartialRows([one, other], [35, 1])
    assert (one.num_bytes, other.num_bytes) == (one.bytes_for(35), other.bytes_for(1))
    k_BGR = random(2, seed=2)
    rows.append(3, k_BGR)
    assert torch.equal(one.read(3, 35)[34], k_BGR[0].bfloat16())
    assert torch.equal(one.read(3, 34), random(34, seed=1).bfloat16())
    assert torch.equal(other.read(3, 1)[0], k_BGR[1].bfloat16())
    assert not one.read(2, 35)[34].any()
    for length in range(36, 200):
        PartialRows([one], [length])
        assert one.num_bytes == one.bytes_for(length)


def test_a_copy_has_the_first_tokens_of_all_layers() -> None:
    source, target = empty(), empty()
    for layer in LAYERS:
        source.write(layer, 0, random(50, seed=layer))
    target.copy_from(source, 37)
    source.release()
    for layer in LAYERS:
        assert torch.equal(target.read(layer, 37), random(50, seed=layer)[:37].bfloat16())
    assert target.num_bytes == target.bytes_for(37)


def test_a_model_may_have_no_layer_that_chooses() -> None:
    keys = PartialKeys(range(2, 2), NUM_KV_HEADS, NUM_COLUMNS, MAX_TOKENS)
    PartialRows([keys], [30])
    keys.copy_from(keys, 30)
    assert (keys.num_bytes, keys.bytes_for(30)) == (0, 0)
    keys.release()


def test_rows_are_chosen_for_in_their_own_layer(way: str) -> None:
    """The layer's highest keys are picked, besides the first two and the last three."""
    keys = empty()
    for layer in LAYERS:
        k_TGR = torch.zeros(40, NUM_KV_HEADS, NUM_COLUMNS)
        k_TGR[5 * layer, :, 0] = 100.0
        keys.write(layer, 0, k_TGR)
    rows = PartialRows([keys], [40])
    for layer in LAYERS:
        found = rows.select(layer, torch.ones(1, 9, NUM_COLUMNS), CHOICE)
        assert lists(found) == [[0, 1, 5 * layer, 37, 38, 39]] * NUM_KV_HEADS
        found = rows.select(layer, torch.ones(1, 9, NUM_COLUMNS), CHOICE, has_new=False)
        assert lists(found) == [[0, 1, 5 * layer, 37, 38, 39]] * NUM_KV_HEADS


def lists(picks: Picks) -> list[list[int]]:
    """Keys of the only row, by kv head."""
    return [keys_K[:num].tolist() for keys_K, num in zip(picks.keys_BGK[0], picks.num_BG[0].tolist(), strict=True)]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"alpha": 0.0}, "alpha = 0.0 "),
        ({"alpha": math.nan}, "alpha = nan "),
        ({"most_share": 0.0}, "most_share = 0.0 "),
        ({"most_share": 1.1}, "most_share = 1.1 "),
        ({"most_share": math.nan}, "most_share = nan "),
        ({"num_first": -1}, "num_first = -1 "),
        ({"num_last": 0}, "num_last = 0 "),
        ({"free_keys": 0}, "free_keys = 0 "),
    ],
)
def test_a_selection_out_of_its_limits_is_refused(fields: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}.*: use "):
        Selection(**{"alpha": 4.0, "most_share": 0.2, "num_first": 4, "num_last": 16, **fields})  # type: ignore[arg-type]

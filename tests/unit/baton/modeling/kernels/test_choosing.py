"""The choice among kernels: an alternative has to be faster by a margin, and ties always fall to the same side."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from baton.modeling.forward.linear import PanelLinear, TorchLinear
from baton.modeling.forward.norms import RmsNorm, unchanged
from baton.modeling.kernels import choosing, native
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.processor import processor_kind
from baton.modeling.kernels.products import DOT, TILES, WIDENED
from tests.support.kernels.paths import require


def preferred() -> None:
    """Take the preferred kernel's time, as `timed` has it."""


def other() -> None:
    """Take the other kernel's time."""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[float]], None]:
    """Set how many times as long as the other kernel the preferred one takes, comparison by comparison."""

    def use(ratios: Iterator[float]) -> None:
        monkeypatch.setattr(choosing, "_cpu_ns", lambda run: next(ratios) * 1e6 if run is preferred else 1e6)

    return use


@pytest.mark.parametrize(
    ("ratio", "is_beaten"), [(0.5, False), (1.0, False), (choosing.MARGIN, False), (1.06, True), (3.0, True)]
)
def test_an_alternative_has_to_be_faster_by_the_margin(
    ratio: float, is_beaten: bool, timed: Callable[[Iterator[float]], None]
) -> None:
    timed(itertools.repeat(ratio))
    assert choosing._is_beaten(preferred, other) is is_beaten


@pytest.mark.parametrize(("ratio", "is_beaten"), [(1.0, False), (1.15, True)])
def test_noise_of_a_tenth_does_not_turn_the_choice(
    ratio: float, is_beaten: bool, timed: Callable[[Iterator[float]], None]
) -> None:
    for seed in range(200):
        noise = random.Random(seed)
        timed(ratio * noise.gauss(1, 0.05) for _ in itertools.count())
        assert choosing._is_beaten(preferred, other) is is_beaten


def test_a_comparison_that_never_becomes_sure_ends(timed: Callable[[Iterator[float]], None]) -> None:
    timed(itertools.cycle((0.9, 1.2)))
    assert choosing._is_beaten(preferred, other) is False


@pytest.mark.parametrize(
    ("beaten_at", "torch_rows"),
    [((), None), ((512,), 512), ((128, 512), 128), ((1, 16, 32, 64, 128, 512), 1), ((1, 16), None), ((16, 512), 512)],
)
def test_torch_takes_over_where_it_wins_from_there_on(
    beaten_at: tuple[int, ...], torch_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(native.NATIVE)
    asked = iter(sorted(choosing.ROWS, reverse=True))
    monkeypatch.setattr(choosing, "_is_beaten", lambda ours, torchs: next(asked) in beaten_at)
    assert choosing._choose_torch_rows(KERNELS.choice.panels) == torch_rows


@pytest.mark.parametrize("is_beaten", [False, True])
def test_a_choice_is_of_what_this_processor_has(is_beaten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever kernels are faster; tests/unit/baton/modeling/kernels/test_main.py measures them."""
    require(native.NATIVE)
    monkeypatch.setattr(choosing, "_is_beaten", lambda *_: is_beaten)
    choice = choosing.measure_choice()
    assert choice.processor == processor_kind()
    assert choice.attention in (TILES, DOT, WIDENED)
    assert choice.panels in (TILES, DOT, WIDENED)
    without = (DOT, WIDENED) if native.operators().has_dots else (WIDENED,)
    assert choosing.measure_choice(tiles=False).panels in without


@torch.inference_mode()
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_what_is_timed_is_what_layers_compute(is_gated: bool, has_norm: bool) -> None:
    weight_NK, x_TK = choosing._random(64, 32), choosing._random(5, 32)
    residual_TN = choosing._random(5, 32 if is_gated else 64)
    norm = RmsNorm(torch.ones(32, dtype=torch.bfloat16), choosing._EPS) if has_norm else unchanged
    timed = choosing._by_torch(weight_NK, is_gated, has_norm)
    assert torch.equal(timed(x_TK, residual_TN), TorchLinear(weight_NK, None, is_gated)(x_TK, norm, residual_TN))
    if not is_gated:  # gated, the kernel wants rows in an order that timing does without
        require(native.NATIVE)
        for product in (WIDENED, DOT):
            timed = choosing._in_panels(product, weight_NK, is_gated, has_norm)
            ours = PanelLinear(weight_NK, None, is_gated, product=product)
            assert torch.equal(timed(x_TK, residual_TN), ours(x_TK, norm, residual_TN))


def test_without_a_compiler_all_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: False)
    assert choosing.measure_choice().torch_rows == 1

"""A process uses the cluster's choice for its kind of processor, else the one that its machine has kept."""

import pytest

from baton.modeling.forward.linear import LinearByRows, PanelLinear, TorchLinear, make_linear
from baton.modeling.kernels import native, process_kernels
from baton.modeling.kernels.process_kernels import ProcessKernels
from baton.modeling.kernels.processor import processor_kind
from baton.modeling.kernels.products import DOT, WIDENED
from baton.types import KernelChoice
from tests.support.kernels.paths import require
from tests.support.models.tiny_models import random_decoder

KEPT = KernelChoice(processor_kind(), DOT, WIDENED, None)
GIVEN = KernelChoice(processor_kind(), WIDENED, WIDENED, 32)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have kept a choice."""
    monkeypatch.setattr(process_kernels, "load_or_measure", lambda: KEPT)
    monkeypatch.setattr(native, "load", lambda: True)


def test_what_is_kept_holds_where_no_choice_is_given() -> None:
    assert ProcessKernels().choice == KEPT
    assert ProcessKernels().use(()) == KEPT


def test_a_choice_for_this_kind_of_processor_holds_before_what_is_kept() -> None:
    kernels = ProcessKernels()
    other = KernelChoice("another kind", WIDENED, WIDENED, 1)
    assert kernels.use((other, GIVEN)) == GIVEN
    assert kernels.choice == GIVEN
    assert ProcessKernels().use((other,)) == KEPT


def test_without_kernels_a_given_choice_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: False)
    assert ProcessKernels().use((GIVEN,)) == KEPT


@pytest.mark.parametrize(("torch_rows", "kind"), [(None, PanelLinear), (32, LinearByRows), (1, TorchLinear)])
def test_linear_layers_are_those_of_the_choice(
    torch_rows: int | None, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    require(native.NATIVE)
    monkeypatch.setattr(
        process_kernels.KERNELS, "_choice", KernelChoice(processor_kind(), WIDENED, WIDENED, torch_rows)
    )
    weights = random_decoder(dtype="bfloat16").weights
    assert all(isinstance(layer.qkv, kind) for layer in weights.layers)
    # A head sees few rows: its weight is not kept twice.
    assert isinstance(weights.head, TorchLinear if torch_rows == 1 else PanelLinear)
    assert isinstance(make_linear(weights.head.weight().float()), TorchLinear)

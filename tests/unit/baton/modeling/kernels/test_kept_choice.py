"""The choice among kernels is measured once and kept for all processes of this kind of processor."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from baton.modeling.kernels import choosing, kept_choice, native
from baton.modeling.kernels.processor import processor_kind
from baton.modeling.kernels.products import TILES, WIDENED
from baton.types import KernelChoice

pytestmark = pytest.mark.integration

MEASURED = KernelChoice(processor_kind(), WIDENED, WIDENED, torch_rows=64)


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[KernelChoice]:
    """An empty cache and kernels that can run; what measuring found so far."""
    monkeypatch.setattr(native, "_folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(native, "load", lambda: True)
    found: list[KernelChoice] = []

    def measure() -> KernelChoice:
        found.append(MEASURED)
        return MEASURED

    monkeypatch.setattr(choosing, "measure_choice", measure)
    return found


def test_a_choice_is_measured_once_and_read_from_then_on(measurements: list[KernelChoice]) -> None:
    assert kept_choice.load_choice() is None
    assert kept_choice.load_or_measure() == MEASURED
    assert kept_choice.load_choice() == MEASURED
    assert kept_choice.load_or_measure() == MEASURED
    assert len(measurements) == 1


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"processor": ""}', json.dumps(asdict(replace(MEASURED, processor="another")))]
)
def test_a_file_that_holds_no_choice_for_this_processor_is_replaced(
    text: str, measurements: list[KernelChoice]
) -> None:
    native.choice_path().parent.mkdir()
    native.choice_path().write_text(text)
    assert kept_choice.load_or_measure() == MEASURED
    assert kept_choice.load_choice() == MEASURED


def test_without_kernels_that_run_nothing_is_kept(
    measurements: list[KernelChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "load", lambda: False)
    kept_choice.load_or_measure()
    assert kept_choice.load_choice() is None


def test_where_nothing_can_be_written_every_process_measures(
    measurements: list[KernelChoice], caplog: pytest.LogCaptureFixture
) -> None:
    native.choice_path().parent.write_text("a file in the folder's place")
    assert kept_choice.load_or_measure() == MEASURED
    assert kept_choice.load_or_measure() == MEASURED
    assert len(measurements) == 2
    assert "cannot be kept" in caplog.text


def test_a_launcher_reads_it_without_torch() -> None:
    code = "import sys, baton.modeling.kernels.kept_choice as k; k.load_choice(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


def test_a_choice_says_what_computes_what() -> None:
    assert str(MEASURED) == "attention widened, linear layers widened, from 64 rows on by torch"
    assert str(KernelChoice("any", TILES, TILES, None)) == "attention tiles, linear layers tiles"
    assert str(KernelChoice("any", WIDENED, WIDENED, 1)) == "attention widened, linear layers by torch"

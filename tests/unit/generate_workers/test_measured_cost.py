"""An engine begins with what steps were measured to cost, if they were; what cannot be used is logged."""

import logging
from pathlib import Path

import pytest

from baton.planning.hardware import cpu_rank
from baton.planning.step_times import nominal_steps, path_beside, save, tabulate
from baton.planning.work_cost import StepWork
from baton.settings.place import WorkerPlace
from baton_lab.study.known_models import SHAPES
from generate_workers.host import measured_cost

ASSUMED = nominal_steps("tiny", "here", SHAPES["smollm2-135m"], cpu_rank(2, 2))


def place(step_times: Path | str) -> WorkerPlace:
    return WorkerPlace(model_folder=Path("model"), step_times=str(step_times))


def test_measured_costs_are_read(tmp_path: Path) -> None:
    path = path_beside(tmp_path / "calibration.json", ASSUMED)
    rounds = [(StepWork(5 * rows, 1000 * rows, 5000 * rows), 0.03 * rows) for rows in (1, 4)]
    made, _ = tabulate(ASSUMED, (1, 4), (64, 256), ((0.01, 0.02), (0.02, 0.05)), rounds)
    save(made, path)
    assert measured_cost(place(path)) == made.cost


def test_without_measurements_there_are_none(tmp_path: Path) -> None:
    path = path_beside(tmp_path / "calibration.json", ASSUMED)
    assert measured_cost(place("")) is None
    assert measured_cost(place(path)) is None
    save(ASSUMED, path)
    assert measured_cost(place(path)) is None


@pytest.mark.parametrize(
    ("text", "why"), [('{"kind"', "is not valid JSON"), (None, "another model or hardware than its name")]
)
def test_a_file_that_cannot_be_used_is_logged(
    tmp_path: Path, text: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "0123456789abcdef.json"
    save(ASSUMED, path)
    if text is not None:
        path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert measured_cost(place(path)) is None
    assert str(path) in caplog.text and why in caplog.text and "nominal costs" in caplog.text

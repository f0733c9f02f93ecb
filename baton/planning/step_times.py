"""Durations of generation steps, by number of sequences in the batch and tokens of each sequence. They come from a
measured table or from nominal rates.

  {"kind": "baton-step-times", "schema": 2, "model": ..., "hardware": ..., "fingerprint": ..., "shape": {...},
   "batches": [1, 4, 16], "contexts": [192, 1024], "seconds": [[1: 192, 1024], [4: ...], ...],
   "cost": {"step_s": ..., "token_s": ..., "key_s": ..., "pair_s": ...}}

Inside the grid of measured times, predictions are interpolated linearly along each axis. This is exact for a step that
reads its weights and its KV once: step_s + batch * (token_s + context * key_s). Above the grid, the nearest measured
time is used, plus the additional time according to `cost`. `cost` is a WorkCost that is fitted to the grid and to
rounds with drafts. Below the grid, the nearest time is used. Without a grid, only `cost` is used. More sequences or
tokens never take less time: if a measured time was shorter by chance, the longer time is used.

Generation engines start with `cost`, and learn from their own steps (`baton.planning.step_cost`). All functions are
pure, except those that load and save files, which block on the disk.
"""

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.errors import ConfigError, InvalidArgumentError
from baton.planning import json_file
from baton.planning.fit import fit_work
from baton.planning.hardware import Hardware, derive_step
from baton.planning.model_shape import ModelShape, shape_from
from baton.planning.work_cost import StepWork, WorkCost

KIND = "baton-step-times"
SCHEMA = 2


@dataclass(frozen=True)
class StepTimes:
    """Durations of generation steps of one model on one kind of generation engine, measured or nominal."""

    model: str
    hardware: str
    """Description of the engine's hardware, for example processor, threads or GPU. Equal descriptions mean equal
    hardware."""
    shape: ModelShape
    cost: WorkCost
    """Cost of a step as a function of its work. It is used outside the measured grid, or everywhere if nothing was
    measured."""
    batches: tuple[int, ...] = ()
    """Measured batch sizes (numbers of sequences), in ascending order. Empty if nothing was measured."""
    contexts: tuple[int, ...] = ()
    """Measured numbers of tokens of each sequence, in ascending order. Empty if nothing was measured."""
    seconds: tuple[tuple[float, ...], ...] = ()
    """Measured durations in seconds, indexed by [batch size, number of tokens], in the order of `batches` and
    `contexts`."""

    def __post_init__(self) -> None:
        for name, axis in (("batches", self.batches), ("contexts", self.contexts)):
            if any(low >= high for low, high in itertools.pairwise((0, *axis))):
                raise ConfigError(f"{name} = {axis} do not ascend from 1: sort them, each once")
        widths = [len(row) for row in self.seconds]
        if widths != [len(self.contexts)] * len(self.batches) or bool(self.batches) != bool(self.contexts):
            raise ConfigError("seconds are not one for each of the batches and contexts: calibrate again")
        if not all(0 < each < float("inf") for row in self.seconds for each in row):
            raise ConfigError("seconds are out of range: give finite numbers above 0, or calibrate again")

    @property
    def is_measured(self) -> bool:
        """True if there is a grid of measured times. False if the times are nominal."""
        return bool(self.batches)

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of 16 hex digits. Step times with the same model, shape and hardware have the same
        fingerprint, even if their measurements differ."""
        key = json.dumps([KIND, self.model, self.hardware, self.shape.identity], sort_keys=True)
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()

    def step_s(self, batch: float, context: float) -> float:
        """Return the duration in seconds of a step with `batch` sequences of `context` tokens each (the mean if lengths
        differ).

        More sequences or tokens never give a shorter duration. Raises InvalidArgumentError if `batch` is below 1 or
        `context` is negative.
        """
        if not 1 <= batch < float("inf") or not 0 <= context < float("inf"):
            raise InvalidArgumentError(f"a step of {batch} rows of {context} tokens: give one row or more")
        if not self.is_measured:
            return self.cost.plain_s(batch, context)
        row, row_share = _place(self.batches, batch)
        column, column_share = _place(self.contexts, context)
        corners = self._rising[row : row + 2, column : column + 2]
        along = corners[:, 0] + column_share * (corners[:, -1] - corners[:, 0])
        inside_s = float(along[0] + row_share * (along[-1] - along[0]))
        return inside_s + self._beyond_s(batch, context)

    def _beyond_s(self, batch: float, context: float) -> float:
        """Return the seconds that are added for sequences and tokens beyond the measured grid."""
        rows = min(max(batch, self.batches[0]), self.batches[-1])
        tokens = min(max(context, self.contexts[0]), self.contexts[-1])
        outer = self.cost.plain_s(max(batch, rows), max(context, tokens))
        return outer - self.cost.plain_s(rows, tokens)

    @cached_property
    def _rising(self) -> NDArray[np.float64]:
        """Measured seconds, raised where needed so that they never decrease with batch or context: `[batches,
        contexts]`."""
        table = np.array(self.seconds, dtype=np.float64)
        rising: NDArray[np.float64] = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
        return rising


def tabulate(
    origin: StepTimes,
    batches: Sequence[int],
    contexts: Sequence[int],
    seconds: Sequence[Sequence[float]],
    rounds: Sequence[tuple[StepWork, float]] = (),
) -> tuple[StepTimes, float]:
    """Create step times from measurements. Return the step times, and the largest relative deviation of a measured time
    from the time that the fitted cost predicts.

    `origin` specifies the model and hardware. `seconds` has one entry for each of `batches`, and each entry has one
    time for each of `contexts`. `rounds` contains measured rounds with drafts, as (work, seconds).

    If `rounds` is empty, the fitted cost takes its coefficient `pair_s` from `origin`. In this case, `token_s` is 0 if
    only one batch size was measured, and `key_s` is 0 if only one context was measured. Raises ConfigError for invalid
    axes or times.
    """
    table = tuple(map(tuple, seconds))
    made = replace(origin, batches=tuple(batches), contexts=tuple(contexts), seconds=table)
    has_rows, has_keys = (bool(rounds) or len(axis) > 1 for axis in (made.batches, made.contexts))
    cells = [StepWork.plain(rows * has_rows, rows * each * has_keys) for rows in batches for each in contexts]
    plain = zip(cells, itertools.chain.from_iterable(table), strict=True)
    cost, residual = fit_work([*plain, *rounds], origin.cost)
    return replace(made, cost=cost), residual


def nominal_steps(
    model: str, hardware: str, shape: ModelShape, rates: Hardware, *, weight_bytes: float | None = None
) -> StepTimes:
    """Return the step times to use before anything is measured. A step reads weights and KV once at the nominal
    bandwidth, and computes at the nominal FLOP/s. `weight_bytes` is the size of one weight in bytes; None: the value of
    the shape."""
    read_bytes = shape.step_weights * (weight_bytes or shape.dtype_bytes)
    return StepTimes(model, hardware, shape, derive_step(shape, rates, weight_bytes=read_bytes))


def path_beside(calibration: Path, times: StepTimes) -> Path:
    """Return the path at which step times are stored. The file is in the folder of the prefill calibration
    `calibration`, and its name contains the fingerprint of `times`."""
    return calibration.with_name(f"{times.fingerprint}.json")


def save(times: StepTimes, path: Path) -> None:
    """Write the step times to a file, and replace an existing file. Raises ConfigError if the file cannot be
    written."""
    json_file.write(path, dumps(times))


def dumps(times: StepTimes) -> str:
    """Return the step times as JSON text, in the format of a step times file."""
    return json_file.dump(KIND, SCHEMA, {**asdict(times), "fingerprint": times.fingerprint})


def load(path: Path) -> StepTimes:
    """Read step times from a file that `save` has written. Raises ConfigError if it cannot be read; the message names
    the file, the field and the remedy."""
    return loads(json_file.read(path, KIND), str(path))


def load_kept(path: Path) -> StepTimes | None:
    """Read step times from a path that `path_beside` has returned. Returns None if the file does not exist.

    Raises the errors of `load`. Also raises ConfigError if the fingerprint in the file's name is not that of the model
    and hardware that the file describes.
    """
    if not path.exists():
        return None
    found = load(path)
    if found.fingerprint != path.stem:
        raise ConfigError(f"{path}: of another model or hardware than its name says: remove it")
    return found


def loads(text: str, where: str) -> StepTimes:
    """Read step times from text that `dumps` has returned. `where` names the source of the text in error messages.
    Raises ConfigError for invalid text; the message names the field and the remedy."""
    with json_file.naming(where):
        data = json_file.parse(text, KIND, SCHEMA)
        model, hardware = json_file.text(data, "model"), json_file.text(data, "hardware")
        numbers, shape = json_file.section(data, "cost"), shape_from(json_file.section(data, "shape"), "shape")
        with json_file.naming("cost"):
            costs = {field.name: json_file.number(numbers, field.name) for field in fields(WorkCost)}
        batches, contexts = _whole_numbers(data, "batches"), _whole_numbers(data, "contexts")
        times = StepTimes(model, hardware, shape, WorkCost(**costs), batches, contexts, _rows(data))
        if data.get("fingerprint") != times.fingerprint:
            raise ConfigError("fingerprint does not match model, hardware and shape: calibrate again")
        return times


def _whole_numbers(data: dict[str, Any], name: str) -> tuple[int, ...]:
    value = data.get(name)
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise ConfigError(f"{name} is not a list of whole numbers: calibrate again")
    return tuple(value)


def _rows(data: dict[str, Any]) -> tuple[tuple[float, ...], ...]:
    try:
        return tuple(tuple(float(each) for each in row) for row in data["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError("seconds is not a list of lists of numbers: calibrate again") from error


def _place(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    """Return the index of the largest axis point that is not above a value, and the fraction (0 to 1) of the way to the
    next axis point."""
    if len(axis) == 1:
        return 0, 0.0
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    share = (value - axis[index]) / (axis[index + 1] - axis[index])
    return index, min(max(share, 0.0), 1.0)

"""Calibration file: measurements of one model on one kind of machine, and the cost model that is fitted to them.

  {"kind": "baton-calibration", "schema": 1,
   "model": "smollm2-135m", "hardware": "2 x AMD EPYC, 1 thread a rank", "kernel": "causal",
   "shape": {ModelShape's fields},
   "prefill_points": [[tokens, seconds], ...],            whole prompts, each computed by one rank alone
   "rank_rows": [[tokens, before, last, seconds], ...],   one entry per rank of a chain, see below
   "link_points": [[bytes, seconds], ...],                single messages between neighbouring ranks
   "cost": {"linear_s": ..., "pair_s": ..., "fixed_s": ..., "issue_s": ..., "head_s": ..., "copy_s": ...},
   "link": {"latency_s": ..., "bandwidth": ...}, "push": null or an object like "link"}

Entries of `rank_rows` are measured while all ranks of the chain compute: number of tokens of the rank's chunk, number
of keys before the chunk, whether the rank is the last one of its chain, and the rank's compute time.

A file without measurements contains costs that are derived from the hardware's nominal rates. The fingerprint of a
calibration identifies the model and hardware. Tables of partitions store this fingerprint, so that they are used only
with matching calibrations. `load` and `save` block on the disk; all other functions are pure.
"""

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, InvalidArgumentError
from baton.planning import json_file
from baton.planning.cost_model import BATON, COSTS, CostModel, Kernel, LinkModel
from baton.planning.fit import RankRow, fit_link, fit_ranks
from baton.planning.hardware import Hardware, derive
from baton.planning.model_shape import ModelShape, shape_from

KIND = "baton-calibration"
SCHEMA = 1

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Calibration:
    """Cost model, the model and hardware for which it is valid, and the measurements to which it was fitted."""

    model: str
    """Name of the model."""
    hardware: str
    """Description of a rank and its link, for example processor, threads or GPU, and interconnect. Calibrations with
    equal descriptions are for equal hardware."""
    kernel: Kernel
    """Attention kernel of the measured rank. It determines which pairs of queries and keys were computed."""
    shape: ModelShape
    prefill_points: Points
    """Measurements, as (tokens, seconds), of whole prompts that one rank computed alone."""
    link_points: Points
    """Measurements, as (bytes, seconds), of single messages between neighbouring ranks of a chain."""
    cost: CostModel
    rank_rows: tuple[RankRow, ...] = ()
    """Measurements of ranks of prefill chains, one entry per rank: the time in which the rank computed its chunk while
    all other ranks of the chain also computed."""

    def __post_init__(self) -> None:
        """Raise ConfigError, naming the field, if a number cannot be the result of a measurement."""
        rows = [(row.tokens, row.before, row.seconds) for row in self.rank_rows]
        measured = {"prefill_points": self.prefill_points, "link_points": self.link_points, "rank_rows": rows}
        for name, points in measured.items():
            for numbers in points:
                if not all(0 <= number < math.inf for number in numbers):
                    raise ConfigError(
                        f"{name}: {numbers} is out of range: use finite numbers of at least 0, or calibrate again"
                    )

    @property
    def is_measured(self) -> bool:
        """True if the costs were fitted to measurements of this model on this hardware; False if they are nominal."""
        return bool(self.prefill_points or self.rank_rows)

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of 16 hex digits. Calibrations with the same model, shape, hardware and kernel have the
        same fingerprint, even if their measurements differ."""
        key = json.dumps([self.model, self.hardware, self.kernel.value, self.shape.identity], sort_keys=True)
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def calibrate_chain(
    origin: Calibration, rank_rows: Sequence[RankRow], link_points: Points, request_s: float
) -> tuple[Calibration, float]:
    """Fit a cost model to measurements of a prefill chain that serves requests. Return the calibration, and the largest
    relative residual of `rank_rows`.

    `origin` specifies the model and hardware, and the costs that are not measured. `request_s` is the time in seconds
    that a request spends outside the chain; it is stored as `head_s`. If `link_points` is empty (a chain of one rank),
    the link model of `origin` is kept. If larger messages did not take longer, as on a fast idle link, only the
    bandwidth of `origin` is kept. Raises InvalidArgumentError if there are too few rows, or if times do not increase
    with the number of tokens.
    """
    former = origin.cost
    fit = fit_ranks(rank_rows, former, BATON)
    if not fit.linear_s + fit.pair_s > 0:
        raise InvalidArgumentError("rank_rows: longer chunks took no longer: measure longer prompts")
    cost = dataclasses.replace(
        former,
        linear_s=fit.linear_s,
        pair_s=fit.pair_s,
        fixed_s=fit.fixed_s,
        issue_s=0.0,
        head_s=request_s,
        link=measured_link(link_points, former.link) if link_points else former.link,
    )
    measured = dataclasses.replace(
        origin, prefill_points=(), link_points=link_points, rank_rows=tuple(rank_rows), cost=cost
    )
    return measured, fit.residual


def nominal(model: str, hardware: str, shape: ModelShape, rates: Hardware) -> Calibration:
    """Return the calibration to use before anything is measured. It is derived from the FLOPs and bytes of the model
    and the nominal rates of the hardware."""
    return Calibration(model, hardware, Kernel.CAUSAL, shape, (), (), derive(shape, rates))


def save(calibration: Calibration, path: Path) -> None:
    """Write the calibration to a file, replacing an existing one. Raises ConfigError when it cannot be written."""
    json_file.write(path, dumps(calibration))


def dumps(calibration: Calibration) -> str:
    """Return the calibration as JSON text, in the format of a calibration file."""
    cost = calibration.cost
    fields = {
        "model": calibration.model,
        "hardware": calibration.hardware,
        "kernel": calibration.kernel.value,
        "fingerprint": calibration.fingerprint,
        "shape": asdict(calibration.shape),
        "prefill_points": calibration.prefill_points,
        "rank_rows": [astuple(row) for row in calibration.rank_rows],
        "link_points": calibration.link_points,
        "cost": {name: getattr(cost, name) for name in COSTS},
        "link": _link_fields(cost.link),
        "push": None if cost.push is None else _link_fields(cost.push),
    }
    return json_file.dump(KIND, SCHEMA, fields)


def load(path: Path) -> Calibration:
    """Read a calibration from a file that `save` has written. Raises ConfigError if it cannot be read; the message
    names the file, the field and the remedy."""
    return loads(json_file.read(path, KIND), str(path))


def loads(text: str, where: str) -> Calibration:
    """Read a calibration from text that `dumps` has returned. `where` names the source of the text in error messages.
    Raises ConfigError for invalid text; the message names the field and the remedy."""
    with json_file.naming(where):
        data = json_file.parse(text, KIND, SCHEMA)
        calibration = _calibration(data)
        if data.get("fingerprint", calibration.fingerprint) != calibration.fingerprint:
            raise ConfigError("fingerprint does not match model, hardware, kernel and shape: calibrate again")
        return calibration


def _calibration(data: dict[str, Any]) -> Calibration:
    shape = shape_from(json_file.section(data, "shape"), "shape")
    numbers = json_file.section(data, "cost")
    try:
        kernel = Kernel(data.get("kernel"))
    except ValueError as error:
        raise ConfigError(f"kernel = {data.get('kernel')!r} is unknown: use dense or causal") from error
    with json_file.naming("cost"):
        fields = {name: json_file.number(numbers, name) for name in COSTS}
    cost = CostModel(
        shape.num_layers,
        kv_bytes=shape.kv_bytes,
        project_share=shape.project_share,
        link=_link(data, "link"),
        push=None if data.get("push") is None else _link(data, "push"),
        **fields,
    )
    points, messages = _points(data, "prefill_points"), _points(data, "link_points")
    model, hardware = json_file.text(data, "model"), json_file.text(data, "hardware")
    return Calibration(model, hardware, kernel, shape, points, messages, cost, _rows(data))


def measured_link(points: Points, former: LinkModel) -> LinkModel:
    """Return the link model fitted to `points`, which are measured (bytes, seconds) of single messages. If larger
    messages did not take longer in the measurements, the result has the bandwidth of `former`, the previous link
    model."""
    try:
        return fit_link(points)
    except InvalidArgumentError:  # all sizes are equal, or larger ones took no longer: only the latency can be fitted
        beyond_s = [seconds - num_bytes / former.bandwidth for num_bytes, seconds in points]
        return LinkModel(max(statistics.median(beyond_s), 0.0), former.bandwidth)


def _link_fields(link: LinkModel) -> dict[str, float | None]:
    """Return the link's fields for JSON. JSON has no infinity, so an infinite bandwidth is stored as null."""
    return {"latency_s": link.latency_s, "bandwidth": None if link.bandwidth == float("inf") else link.bandwidth}


def _link(data: dict[str, Any], name: str) -> LinkModel:
    fields = json_file.section(data, name)
    with json_file.naming(name):
        bandwidth = math.inf if fields.get("bandwidth", 0) is None else json_file.number(fields, "bandwidth")
        return LinkModel(json_file.number(fields, "latency_s"), bandwidth)


def _points(data: dict[str, Any], name: str) -> Points:
    try:
        return tuple((float(x), float(seconds)) for x, seconds in data[name])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is not a list of pairs of numbers: calibrate again") from error


def _rows(data: dict[str, Any]) -> tuple[RankRow, ...]:
    """Return the rank rows of a file; empty if the file has only measurements of single ranks."""
    try:
        return tuple(
            RankRow(int(tokens), int(before), bool(last), float(seconds))
            for tokens, before, last, seconds in data.get("rank_rows", ())
        )
    except (TypeError, ValueError, OverflowError) as error:  # int() of an infinity overflows
        raise ConfigError("rank_rows is not a list of four numbers each: calibrate again") from error

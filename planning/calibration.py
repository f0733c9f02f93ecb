"""What was measured of one model on one kind of machine, as a file: the cost model's numbers and where they come from.

    {"kind": "baton-calibration", "schema": 1,
     "model": "smollm2-135m", "hardware": "2 x AMD EPYC, 1 thread a rank", "kernel": "causal",
     "shape": {ModelShape's fields},
     "prefill_points": [[tokens, seconds], ...],      one rank, whole prompts
     "link_points": [[bytes, seconds], ...],          single messages between neighbours
     "cost": {"linear_s": ..., "pair_s": ..., "fixed_s": ..., "issue_s": ..., "head_s": ..., "copy_s": ...},
     "link": {"latency_s": ..., "bandwidth": ...}, "push": null, or as link}

The fingerprint names what a table of partitions was made for. Pure but for load and save, which block on the disk.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from planning import json_file
from planning.cost_model import CostModel, Kernel, Link
from planning.fit import fit_link, fit_prefill
from planning.model_shape import ModelShape, shape_from

KIND = "baton-calibration"
SCHEMA = 1

Points = tuple[tuple[float, float], ...]

_COSTS = ("linear_s", "pair_s", "fixed_s", "issue_s", "head_s", "copy_s")


@dataclass(frozen=True)
class Calibration:
    """A cost model with its origin."""

    model: str
    """Name of the model."""
    hardware: str
    """What tells this kind of rank and link from others: processor, threads or GPU, interconnect."""
    kernel: Kernel
    """Which of its pairs a lone rank computed."""
    shape: ModelShape
    prefill_points: Points
    """(tokens, seconds) of whole prompts on one rank."""
    link_points: Points
    """(bytes, seconds) of single messages."""
    cost: CostModel

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits, equal for the same model, shape, hardware and kernel, whatever was measured."""
        key = json.dumps([self.model, self.hardware, self.kernel.value, asdict(self.shape)], sort_keys=True)
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def calibrate(
    model: str, hardware: str, shape: ModelShape, *, kernel: Kernel, prefill_points: Points, link_points: Points
) -> Calibration:
    """Fits a cost model to measurements. Raises InvalidArgumentError for too few points."""
    prefill, link = fit_prefill(prefill_points, shape.num_layers, kernel), fit_link(link_points)
    cost = CostModel(
        num_layers=shape.num_layers,
        linear_s=prefill.linear_s,
        pair_s=prefill.pair_s,
        kv_bytes=shape.kv_bytes,
        project_share=shape.project_share,
        fixed_s=prefill.fixed_s,
        head_s=prefill.linear_s * shape.head_flops / shape.linear_flops,
        link=link.link,
    )
    return Calibration(model, hardware, kernel, shape, prefill_points, link_points, cost)


def save(calibration: Calibration, path: Path) -> None:
    """Writes the file, replacing one that is there. Raises ConfigError when it cannot be written."""
    cost = calibration.cost
    json_file.write(
        path,
        KIND,
        SCHEMA,
        {
            "model": calibration.model,
            "hardware": calibration.hardware,
            "kernel": calibration.kernel.value,
            "fingerprint": calibration.fingerprint,
            "shape": asdict(calibration.shape),
            "prefill_points": calibration.prefill_points,
            "link_points": calibration.link_points,
            "cost": {name: getattr(cost, name) for name in _COSTS},
            "link": _link_fields(cost.link),
            "push": None if cost.push is None else _link_fields(cost.push),
        },
    )


def load(path: Path) -> Calibration:
    """Reads what `save` wrote. Raises ConfigError that names file, field and remedy."""
    data = json_file.read(path, KIND, SCHEMA)
    where = str(path)
    shape = shape_from(json_file.section(data, "shape", where), f"{where}: shape")
    numbers = json_file.section(data, "cost", where)
    try:
        kernel = Kernel(data.get("kernel"))
    except ValueError as error:
        raise ConfigError(f"{where}: kernel = {data.get('kernel')!r} is unknown: use dense or causal") from error
    fields = {name: json_file.number(numbers, name, f"{where}: cost") for name in _COSTS}
    link = _link(data, "link", where)
    push = None if data.get("push") is None else _link(data, "push", where)
    num_layers, kv_bytes, share = shape.num_layers, shape.kv_bytes, shape.project_share
    try:
        cost = CostModel(num_layers, kv_bytes=kv_bytes, project_share=share, link=link, push=push, **fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    calibration = Calibration(
        model=_text(data, "model", where),
        hardware=_text(data, "hardware", where),
        kernel=kernel,
        shape=shape,
        prefill_points=_points(data, "prefill_points", where),
        link_points=_points(data, "link_points", where),
        cost=cost,
    )
    if data.get("fingerprint", calibration.fingerprint) != calibration.fingerprint:
        raise ConfigError(f"{where}: fingerprint does not match model, hardware, kernel and shape: calibrate again")
    return calibration


def _link_fields(link: Link) -> dict[str, float | None]:
    """An infinite bandwidth is null: JSON has no infinity."""
    return {"latency_s": link.latency_s, "bandwidth": None if link.bandwidth == float("inf") else link.bandwidth}


def _link(data: dict[str, Any], name: str, where: str) -> Link:
    fields = json_file.section(data, name, where)
    where = f"{where}: {name}"
    latency_s = json_file.number(fields, "latency_s", where)
    if fields.get("bandwidth", 0) is None:
        return Link(latency_s)
    bandwidth = json_file.number(fields, "bandwidth", where)
    try:
        return Link(latency_s, bandwidth)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _text(data: dict[str, Any], name: str, where: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {name} = {value!r} is no text: give a name")
    return value


def _points(data: dict[str, Any], name: str, where: str) -> Points:
    value = data.get(name)
    try:
        return tuple((float(x), float(seconds)) for x, seconds in value)  # type: ignore[union-attr]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {name} is no list of pairs of numbers: calibrate again") from error

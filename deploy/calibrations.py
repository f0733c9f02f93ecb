"""Which calibration a cluster predicts by: the file it was given, else what was kept for its model and hardware, else
what follows from the model's shape and nominal rates. There is always one.

Hardware is that of the machine which asks; all ranks are taken to run on its like. Blocks on the disk.
"""

import logging
import platform
from pathlib import Path

from baton.errors import ConfigError
from baton.paths import cache_folder
from deploy.cluster_config import ClusterConfig
from deploy.config import LocalConfig
from deploy.limits import tokens_of_slot
from planning.calibration import Calibration, load, nominal
from planning.hardware import cpu_rank
from planning.model_shape import ModelShape
from planning.planner import ChainPlanner

logger = logging.getLogger(__name__)

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_PLAIN_FEED_FORWARD = ("opt", "falcon")
"""Model types whose feed-forward part has two matrices, and no gate."""


def nominal_calibration(folder: Path, dtype: str, num_threads: int) -> Calibration:
    """Of the model in `folder` on ranks of `num_threads` threads here. Raises ModelError."""
    hardware = f"{_processor()}, cpu, {num_threads} thread{'s' if num_threads > 1 else ''} a rank"
    shape = _shape(folder, dtype)
    return nominal(folder.name, hardware, shape, cpu_rank(num_threads, shape.dtype_bytes))


def kept_path(calibration: Calibration) -> Path:
    """Where what is measured of the same model and hardware is kept."""
    return cache_folder() / "calibrations" / f"{calibration.fingerprint}.json"


def calibration_path(assumed: Calibration, given: str) -> Path:
    """The file that is read at the start and written by `baton calibrate`: the `given` one, or the kept one's."""
    return Path(given).expanduser() if given else kept_path(assumed)


def find_calibration(assumed: Calibration, given: str) -> Calibration:
    """What is in the file `given`, or kept; `assumed` when none was given and none is kept. A kept one that is damaged
    or of another version counts as none: the log says so. Raises ConfigError for a given one that is damaged, missing,
    or of another model or hardware."""
    path = calibration_path(assumed, given)
    if given:
        return _of_same(assumed, path)
    try:
        return _of_same(assumed, path) if path.exists() else assumed
    except ConfigError as error:
        logger.warning("the calibration kept for this model and hardware is not used: %s", error)
        return assumed


def _of_same(assumed: Calibration, path: Path) -> Calibration:
    found = load(path)
    if found.fingerprint != assumed.fingerprint:
        raise ConfigError(
            f"{path}: calibrated for {found.model} on {found.hardware}, and this is {assumed.model} on "
            f"{assumed.hardware}, or its shape differs: run `baton calibrate` here"
        )
    return found


def served_calibration(config: ClusterConfig, folder: Path) -> Calibration:
    """What a cluster that is about to start predicts by. Raises as `find_calibration`, and ModelError."""
    assumed = nominal_calibration(folder, config.model.dtype, config.prefill.num_threads)
    return find_calibration(assumed, config.prefill.calibration)


def served_planner(config: ClusterConfig, folder: Path) -> ChainPlanner:
    """Of such a cluster; takes as long as making a ChainPlanner does."""
    return ChainPlanner(
        served_calibration(config, folder),
        max_ranks=config.prefill.num_ranks,
        max_tokens=tokens_of_slot(folder, config.generate.max_slot_tokens),
    )


def local_planner(config: LocalConfig) -> ChainPlanner:
    """Of a relay in one process tree."""
    assumed = nominal_calibration(config.model_folder, config.dtype, config.prefill_threads)
    return ChainPlanner(
        find_calibration(assumed, ""),
        max_ranks=max(config.num_ranks, 1),
        max_tokens=tokens_of_slot(config.model_folder, config.max_slot_tokens),
    )


def _processor() -> str:
    """As the kernel names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _shape(folder: Path, dtype: str) -> ModelShape:
    from modeling.weights import load_config  # takes torch along

    model = load_config(folder)
    return ModelShape(
        num_layers=model.num_layers,
        hidden=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn=model.intermediate_size,
        vocab=model.vocab_size,
        gated=model.model_type not in _PLAIN_FEED_FORWARD,
        dtype_bytes=_DTYPE_BYTES[dtype],
    )

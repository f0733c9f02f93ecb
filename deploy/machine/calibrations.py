"""Which calibration a cluster predicts by: the file it was given, else what was kept for its model and hardware, else
what follows from the model's shape and nominal rates. There is always one. Likewise its step times, which are kept
beside the calibration.

Hardware is that of the machine which asks; all ranks are taken to run on its like. Blocks on the disk.
"""

import logging
import platform
from pathlib import Path

from baton.errors import ConfigError
from baton.paths import cache_folder
from baton.types import DTYPE_BYTES
from deploy.config.cluster import ClusterConfig
from deploy.config.worker import LocalConfig, use_threads
from deploy.machine.limits import tokens_of_slot
from planning import step_times
from planning.calibration import Calibration, load, nominal
from planning.hardware import cpu_rank
from planning.local_prefill import LocalPrefill
from planning.model_shape import ModelShape
from planning.planner import ChainPlanner
from planning.step_times import StepTimes, nominal_steps, path_beside

logger = logging.getLogger(__name__)

_WEIGHT_BYTES = {"int8": 1}
"""Where weights have another format than the dtype's."""
_PLAIN_FEED_FORWARD = ("opt", "falcon")
"""Model types whose feed-forward part has two matrices, and no gate."""


def nominal_calibration(folder: Path, dtype: str, num_threads: int, quantization: str = "none") -> Calibration:
    """Of the model in `folder` on ranks of `num_threads` threads here. Raises ModelError."""
    hardware = _machine(f"{num_threads} thread{'s' if num_threads > 1 else ''} a rank", quantization)
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


def nominal_step_times(
    folder: Path, dtype: str, num_threads: int, *, residency: str, quantization: str = "none"
) -> StepTimes:
    """Of the model in `folder` on generation engines of `num_threads` threads here, their KV where `residency` says.
    Raises ModelError."""
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''} an engine"
    hardware = _machine(f"{threads}, residency {residency}", quantization)
    shape, weight_bytes = _shape(folder, dtype), _WEIGHT_BYTES.get(quantization)
    rates = cpu_rank(num_threads, shape.dtype_bytes)
    return nominal_steps(folder.name, hardware, shape, rates, weight_bytes=weight_bytes)


def find_step_times(assumed: StepTimes, calibration: Path) -> StepTimes:
    """What is kept beside that file; `assumed` when none is kept. One that is damaged or of another version counts as
    none: the log says so."""
    path = path_beside(calibration, assumed)
    try:
        found = step_times.load(path) if path.exists() else assumed
    except ConfigError as error:
        logger.warning("the step times kept for this model and hardware are not used: %s", error)
        return assumed
    if found.fingerprint != assumed.fingerprint:
        logger.warning("%s: of another model or hardware than its name says; not used", path)
        return assumed
    return found


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
    return find_calibration(_assumed(config, folder), config.prefill.calibration)


def served_step_times(config: ClusterConfig, folder: Path) -> StepTimes:
    """As `served_calibration`, of its generation groups; also where the file given for prefill is bad. Raises
    ModelError."""
    beside = calibration_path(_assumed(config, folder), config.prefill.calibration)
    assumed = nominal_step_times(
        folder,
        config.model.dtype,
        use_threads(config.generate.num_threads),
        residency=config.generate.residency,
        quantization=config.model.quantization,
    )
    return find_step_times(assumed, beside)


def _assumed(config: ClusterConfig, folder: Path) -> Calibration:
    return nominal_calibration(folder, config.model.dtype, config.prefill.num_threads, config.model.quantization)


def served_planner(config: ClusterConfig, folder: Path, former: ChainPlanner | None = None) -> ChainPlanner:
    """Of such a cluster: `former`, which was made for it, where the calibration is still the same. Else it takes as
    long as making a ChainPlanner does."""
    calibration, steps = served_calibration(config, folder), served_step_times(config, folder)
    if former is not None and former.calibration == calibration:
        former.use_steps(steps)
        return former
    return ChainPlanner(
        calibration,
        max_ranks=config.prefill.num_ranks,
        max_tokens=tokens_of_slot(folder, config.generate.max_slot_tokens),
        steps=steps,
        local=LocalPrefill(
            speed=use_threads(config.generate.num_threads) / config.prefill.num_threads,
            max_step_stretch=config.generate.max_step_stretch,
            max_step_tokens=config.generate.max_prefill_tokens_per_step,
        ),
    )


def local_planner(config: LocalConfig) -> ChainPlanner:
    """Of a relay in one process tree."""
    folder, dtype = config.model_folder, config.dtype
    assumed = nominal_calibration(folder, dtype, config.prefill_threads, config.quantization)
    assumed_steps = nominal_step_times(
        folder,
        dtype,
        use_threads(config.generate_threads),
        residency=config.residency,
        quantization=config.quantization,
    )
    return ChainPlanner(
        find_calibration(assumed, ""),
        max_ranks=max(config.num_ranks, 1),
        max_tokens=tokens_of_slot(folder, config.max_slot_tokens),
        steps=find_step_times(assumed_steps, kept_path(assumed)),
        local=LocalPrefill(
            speed=use_threads(config.generate_threads) / config.prefill_threads,
            max_step_stretch=config.max_step_stretch,
            max_step_tokens=config.max_prefill_tokens_per_step,
        ),
    )


def _machine(engine: str, quantization: str) -> str:
    """What tells engines like these from others."""
    weights = "" if quantization == "none" else f", weights {quantization}"
    return f"{_processor()}, cpu, {engine}{weights}"


def _processor() -> str:
    """As the kernel names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _shape(folder: Path, dtype: str) -> ModelShape:
    from modeling.checkpoints.weights import load_config  # takes torch along

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
        dtype_bytes=DTYPE_BYTES[dtype],
    )

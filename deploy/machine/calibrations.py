"""Finds the data with which a cluster predicts durations: the calibration (costs of prefill) and the step times of
generation.

The data come from the first of these sources that exists:

1. the configured file
2. the file that is stored for this model and hardware
3. estimates from the model's shape and nominal rates

Nominal rates are those of the profile that was measured on this machine for its processor or its GPU
(`deploy.machine.device_profile`). Without a profile, those of a CPU are assumed, and those of a GPU follow from its
data sheet (`baton.planning.gpus`). Step times are stored next to the calibration. The hardware is that of the machine
that runs this code; all workers with the same device are assumed to run on equal machines. Functions block while they
read files.
"""

import logging
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.kernels.processor import processor_name
from baton.planning.calibration import Calibration, load, nominal
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON
from baton.planning.device_profile import DeviceProfile
from baton.planning.hardware import Hardware, derive
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.planning.step_times import StepTimes, load_kept, nominal_steps, path_beside
from baton.settings.paths import cache_folder
from deploy.config.environment import use_threads
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.device_profile import local_profile
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import gpu_name

logger = logging.getLogger(__name__)

_SPEED_TOKENS = 1024
"""Number of prompt tokens with which the speeds of an engine and of a prefill rank are compared."""
_WEIGHT_BYTES = {"int8": 1}
"""Bytes per weight, by quantization. Formats that store weights in the model's dtype are not included."""


def nominal_calibration(
    model: ResolvedModel, dtype: str, num_threads: int, quantization: str = "none", *, device: str = "cpu"
) -> Calibration:
    """Return an estimated calibration of `model` on this machine, computed from nominal rates and not measured. Prefill
    ranks run on `device`; on a CPU, they have `num_threads` threads each. Raises ModelError."""
    hardware = _machine(device, num_threads, "a rank", quantization)
    shape = model.shape(dtype)
    return nominal(model.folder.name, hardware, shape, rates_of(device, num_threads, shape.dtype_bytes))


def kept_path(calibration: Calibration) -> Path:
    """Return the path, in the cache folder, of the file that stores measurements for the model and the hardware of
    `calibration`."""
    return cache_folder() / "calibrations" / f"{calibration.fingerprint}.json"


def calibration_path(assumed: Calibration, given: str) -> Path:
    """Return the path of the calibration file, which `baton calibrate` writes and the cluster reads when it starts. The
    path is `given`, or a path in the cache folder if `given` is empty."""
    return Path(given).expanduser() if given else kept_path(assumed)


def find_calibration(assumed: Calibration, given: str) -> Calibration:
    """Return the calibration in the file `given`. If `given` is empty, return the calibration that was measured earlier
    and stored for this model and hardware. If none is stored, return `assumed`. A stored calibration that is damaged or
    has another schema version is ignored with a warning in the log. Raises ConfigError if the file `given` is damaged,
    does not exist, or belongs to another model or other hardware."""
    path = calibration_path(assumed, given)
    if given:
        return _of_same(assumed, path)
    try:
        return _of_same(assumed, path) if path.exists() else assumed
    except ConfigError as error:
        logger.warning("the calibration kept for this model and hardware is not used: %s", error)
        return assumed


def nominal_step_times(
    model: ResolvedModel,
    dtype: str,
    num_threads: int,
    *,
    residency: str,
    quantization: str = "none",
    device: str = "cpu",
) -> StepTimes:
    """Return estimated step times of `model` on this machine, computed from nominal rates and not measured. Generation
    engines run on `device`; on a CPU, they have `num_threads` threads. The KV is in host or device memory, as the
    policy `residency` requires. Raises ModelError."""
    hardware = _machine(device, num_threads, "an engine", quantization, f", residency {residency}")
    shape, weight_bytes = model.shape(dtype), _WEIGHT_BYTES.get(quantization)
    rates = rates_of(device, num_threads, shape.dtype_bytes)
    return nominal_steps(model.folder.name, hardware, shape, rates, weight_bytes=weight_bytes)


def rates_of(device: str, num_threads: int, dtype_bytes: int) -> Hardware:
    """Return the rates of a worker on this machine: those of its GPU if `device` is "cuda", else those of `num_threads`
    cores. They are nominal unless a profile of this machine is kept."""
    gpu = gpu_name() if device == "cuda" else ""
    return local_profile(device, num_threads, dtype_bytes, gpu=gpu).hardware


def find_step_times(assumed: StepTimes, calibration: Path) -> StepTimes:
    """Return the step times that are stored next to the calibration file, or `assumed` if none are stored. Step times
    that are damaged, that have another schema version, or that belong to another model or hardware, are ignored, and a
    warning is logged."""
    try:
        return load_kept(path_beside(calibration, assumed)) or assumed
    except ConfigError as error:
        logger.warning("the step times kept for this model and hardware are not used: %s", error)
        return assumed


def _of_same(assumed: Calibration, path: Path) -> Calibration:
    found = load(path)
    if found.fingerprint != assumed.fingerprint:
        raise ConfigError(
            f"{path}: calibrated for {found.model} on {found.hardware}, and this is {assumed.model} on "
            f"{assumed.hardware}, or its shape differs: run `baton calibrate` here"
        )
    return found


def served_calibration(plan: ClusterPlan) -> Calibration:
    """Return the calibration that a cluster uses for predictions when it starts. Raises ModelError if the model is not
    valid. Raises ConfigError if the configured calibration file is missing or damaged, or belongs to another model
    or hardware."""
    return find_calibration(_assumed(plan), plan.config.prefill.calibration)


def served_calibration_path(plan: ClusterPlan) -> Path:
    """Return the path of the file in which a cluster saves the calibrations that it receives from `baton calibrate`.
    Raises ModelError if the model is not valid."""
    return calibration_path(_assumed(plan), plan.config.prefill.calibration)


def served_step_times_path(plan: ClusterPlan) -> Path:
    """Return the path of the file in which a cluster's step times are stored. Engines start with these times, until
    they have learnt the costs of their own steps. The file may not exist. Raises ModelError if the model is not
    valid."""
    return path_beside(served_calibration_path(plan), _assumed_steps(plan))


def _assumed_steps(plan: ClusterPlan) -> StepTimes:
    formats, generate = plan.config.model, plan.config.generate
    return nominal_step_times(
        plan.model,
        formats.dtype,
        use_threads(generate.num_threads),
        residency=generate.residency,
        quantization=formats.quantization,
        device=generate.device,
    )


def _assumed(plan: ClusterPlan) -> Calibration:
    formats, prefill = plan.config.model, plan.config.prefill
    threads, quantization = prefill.num_threads, formats.quantization
    return nominal_calibration(plan.model, formats.dtype, threads, quantization, device=prefill.device)


def served_planner(plan: ClusterPlan, former: ChainPlanner | None = None) -> ChainPlanner:
    """Return the planner for a cluster. `former` is a planner that was created earlier for the same cluster; None: no
    planner was created. If `former` uses the current calibration, return `former` with the current step times.
    Otherwise create a new ChainPlanner, which takes time. Raises ModelError if the model is not valid, and ConfigError
    if the configured calibration file is not valid."""
    calibration = served_calibration(plan)
    steps = find_step_times(_assumed_steps(plan), served_calibration_path(plan))
    if former is not None and former.calibration == calibration:
        former.use_steps(steps)
        return former
    prefill, generate = plan.config.prefill, plan.config.generate
    return ChainPlanner(
        calibration,
        max_ranks=prefill.num_ranks,
        max_tokens=plan.max_tokens,
        steps=steps,
        local=LocalPrefill(
            speed=_engine_speed(plan),
            max_step_tokens=generate.max_batched_tokens,
            step_budget_s=generate.step_budget_s,
        ),
        devices=frozenset(profile.name for profile in _profiles(plan)),
    )


def _profiles(plan: ClusterPlan) -> tuple[DeviceProfile, DeviceProfile]:
    """Return the profiles of a prefill rank and of a generation engine on this machine."""
    dtype_bytes = plan.model.shape(plan.config.model.dtype).dtype_bytes
    prefill, generate = (
        local_profile(
            pool.device,
            use_threads(pool.num_threads),
            dtype_bytes,
            gpu=gpu_name() if pool.device == "cuda" else "",
            gpu_share=pool.gpu_share,
        )
        for pool in (plan.config.prefill, plan.config.generate)
    )
    return prefill, generate


def _engine_speed(plan: ClusterPlan) -> float:
    """Return the nominal speed of a generation engine at the prefill of `_SPEED_TOKENS` tokens, relative to that of a
    prefill rank."""
    shape = plan.model.shape(plan.config.model.dtype)
    rank_s, engine_s = (
        float(chain_ttft([_SPEED_TOKENS], derive(shape, profile.hardware), BATON)) for profile in _profiles(plan)
    )
    return rank_s / engine_s


def _machine(device: str, num_threads: int, worker: str, quantization: str, details: str = "") -> str:
    """Return the description that identifies workers of this kind. `worker`: noun with its article."""
    weights = "" if quantization == "none" else f", weights {quantization}"
    if device == "cuda":
        return f"{gpu_name() or 'unknown GPU'}, {device}, one GPU {worker}{details}{weights}"
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''} {worker}"
    return f"{processor_name()}, cpu, {threads}{details}{weights}"

"""Checks before anything is started whether the configured cluster can run on this machine, and suggests remedies.

Each check is a function from the configuration to a finding, and changes nothing. `baton doctor` shows all findings;
`baton serve` refuses to start if a check has failed. Runs on the launcher's main thread.
"""

import enum
import importlib.metadata
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton import __version__
from baton.errors import BatonError, ConfigError, ModelError
from baton.modeling.checkpoints.stored_format import load_format
from baton.process.topology import computing_cpus
from baton.settings.addresses import join_address
from deploy.config.cluster import ClusterConfig
from deploy.config.environment import use_threads
from deploy.machine.cluster_plan import CUDA_WORKER_BYTES, WORKER_BYTES, ClusterPlan
from deploy.machine.planners import worker_profiles
from deploy.machine.this_machine import Machine
from generate_workers.residency.traits import POLICIES

GIB = 2**30
_PACKAGES = ("torch", "ray", "grpcio", "protobuf", "transformers")


class Verdict(enum.Enum):
    """Verdict of a finding: the cluster can run, can run with a disadvantage, or cannot run."""

    OK = "ok"
    WARNING = "warning"
    """The cluster can run, but it could run better."""
    FAILED = "failed"
    """The cluster cannot run with this configuration."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Verdict
    text: str
    """One line of text that describes the finding. It includes the remedy if there is a problem."""


def examine(plan: ClusterPlan, machine: Machine) -> list[Finding]:
    """Run the checks and return their findings. Versions, the model's files, native kernels and ports are always
    checked. This machine's devices, cores and memory, and the file of key selections, are not checked if the cluster
    runs on an existing Ray."""
    config = plan.config
    findings = [versions(), check_model(plan)]
    if not config.ray.address:
        findings += [check_devices(plan, machine), check_selection(config), check_cores(config, machine)]
        findings += [check_memory(plan, machine), check_shm(config, machine), report_profile(plan)]
    return [*findings, check_instruction_set(machine), check_port(config)]


def require(findings: Sequence[Finding]) -> None:
    """Raise ConfigError if a check has failed. The error's text is that of the first failed finding."""
    for finding in findings:
        if finding.verdict is Verdict.FAILED:
            raise ConfigError(f"{finding.name}: {finding.text}")


def versions() -> Finding:
    """Report the installed versions of Baton and of the packages that it uses."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    return Finding("versions", Verdict.OK, ", ".join([f"baton {__version__}", *found]))


def check_model(plan: ClusterPlan) -> Finding:
    """Check that the folder of the model, and the folder of the draft model if there is one, contain all necessary
    files. Also check that the weights have a supported format."""
    dtype, found = plan.config.model.dtype, []
    for field, model in (("model.name", plan.model), ("generate.draft_model", plan.draft)):
        if model is None:
            continue
        folder = model.folder
        missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
        if not any(folder.glob("*.safetensors")):
            missing.append("*.safetensors")
        if missing:
            return Finding(
                "model", Verdict.FAILED, f"{folder} lacks {', '.join(missing)}: set {field} to a whole model"
            )
        try:
            stored = load_format(folder)
        except ModelError as error:
            return Finding("model", Verdict.FAILED, f"{field}: {error}")
        weights = plan.weights_on(plan.config.generate.device)
        size = f"{model.weight_bytes(dtype, weights) / GIB:.2f} GiB"
        if model.keeps_codes(dtype, weights) and stored is not None:
            found.append(f"{folder}, {size}, kept as stored: {stored.description}")
            continue
        source = "" if stored is None else f", dequantised from {stored.description}"
        found.append(f"{folder}, {size} as {dtype}{source}")
    return Finding("model", Verdict.OK, "; drafts by ".join(found))


def check_devices(plan: ClusterPlan, machine: Machine) -> Finding:
    """Check that the configured devices of the workers exist on this machine. List its GPUs, and the sizes of an
    engine, which may follow from the GPU. Warn if GPUs are not used and the user has not chosen another device."""
    config = plan.config
    asked = {"prefill": config.prefill.device, "generate": config.generate.device}
    if not config.prefill.num_groups:
        del asked["prefill"]
    names = {role: "cpu" if name == "auto" else name for role, name in asked.items()}
    link = config.device
    rate = f"{link.link / 1e9:g} GB/s, {1e6 * link.link_latency_s:g} us" if link.link else "as fast as memory copies"
    where = {"emulated": f"emulated (link {rate})"}
    used = ", ".join(f"{role} on {where.get(name, name)}" for role, name in names.items())
    used = f"{used} with {config.generate.num_slots} slots of at most {config.generate.max_slot_tokens} tokens"
    found = f"{used}; {'; '.join(map(str, machine.gpus)) or 'no GPU that nvidia-smi lists'}"
    role = next((role for role, name in names.items() if name == "cuda"), "")
    if role and not (machine.gpus and machine.has_cuda):
        from baton.modeling.device.making import require_cuda  # imports torch

        try:
            require_cuda()
        except ConfigError as error:
            return Finding("devices", Verdict.FAILED, f"{role}.{error}")
    elif config.num_gpus > len(plan.gpus):
        text = f"{role}.device = cuda needs more GPUs ({config.num_gpus}) than can be used ({len(plan.gpus)})"
        remedy = plan.gpu_note or "use fewer ranks or groups, or device = cpu"
        return Finding("devices", Verdict.FAILED, f"{text}: {remedy}")
    if plan.gpu_note:
        return Finding("devices", Verdict.WARNING, f"{found}; {plan.gpu_note}")
    return Finding("devices", Verdict.OK, found)


def check_selection(config: ClusterConfig) -> Finding:
    """Check that a selection file exists, if the configured residency policy or speculation needs one. A selection file
    is written by `baton prepare`, and determines which keys are selected for attention. When workers start, they check
    that the file fits the model."""
    section = config.generate
    chooser = f"residency {section.residency}"
    if not POLICIES[section.residency].chooses_keys:
        if section.speculation != "infinigen":
            return Finding("selection", Verdict.OK, f"{chooser} needs none")
        chooser = "speculation infinigen"
    from baton.modeling.sparse.selection_file import prepared_path  # imports torch

    path = Path(section.selection_file)
    if section.selection_file and not path.is_file():
        return Finding("selection", Verdict.FAILED, f"{path} is not a file: set generate.selection_file to one")
    if not section.selection_file and not any(prepared_path("any").parent.glob("*.safetensors")):
        remedy = "run `baton prepare` with this model, dtype and model.weights, or set generate.selection_file"
        text = f"{chooser} chooses keys, and nothing was prepared: {remedy}"
        return Finding("selection", Verdict.FAILED, text)
    found = str(path) if section.selection_file else f"in {prepared_path('any').parent}"
    return Finding("selection", Verdict.OK, found)


def check_cores(config: ClusterConfig, machine: Machine) -> Finding:
    """Check that the pinned cores exist, and warn when there are more workers than cores."""
    pinned = {core for cores in (*config.prefill.cores, *config.generate.cores) for core in cores}
    pinned |= set(config.orchestrator.cores)
    absent = sorted(pinned - machine.cpus)
    if absent:
        text = f"pinned to {absent}, and there are {sorted(machine.cpus)}: change the sections' cores"
        return Finding("cores", Verdict.FAILED, text)
    num_workers, num_cores = config.num_workers, sum(map(len, computing_cpus(machine.nodes)))
    threads = f" with {len(machine.cpus)} hardware threads" if len(machine.cpus) > num_cores else ""
    nodes = f" on {len(machine.nodes)} NUMA nodes" if len(machine.nodes) > 1 else ""
    text = f"{num_cores}{threads}{nodes} for {num_workers} workers"
    if num_workers > num_cores:
        return Finding("cores", Verdict.WARNING, f"{text}: they share cores; fewer ranks may be as fast")
    return Finding("cores", Verdict.OK, text)


def check_memory(plan: ClusterPlan, machine: Machine) -> Finding:
    """Check that the processes of all workers and the weights fit in the host's memory, where workers on CPUs share the
    weights (`ClusterPlan.host_weight_bytes`). Workers on a GPU have their weights and, with residency device, their KV
    on the GPU. Warn when the weights fit, but weights and KV together do not."""
    config = plan.config
    on_gpus = sum(size for name, size in config.group_sizes.items() if name.partition("-")[0] in config.gpu_shares)
    processes = (config.num_workers - on_gpus) * WORKER_BYTES + on_gpus * CUDA_WORKER_BYTES
    weights = plan.host_weight_bytes(machine)
    needed = processes + weights
    text = f"{machine.available_bytes / GIB:.1f} GiB available, {needed / GIB:.1f} GiB for {config.num_workers} workers"
    if needed > machine.available_bytes:
        remedy = "use fewer ranks or groups, a smaller model, or bfloat16"
        return Finding("memory", Verdict.FAILED, f"{text}: {remedy}")
    most = max(config.num_workers, (config.autoscaling.max - 1) * config.prefill.num_ranks + 1)
    if config.autoscaling.mode == "act" and processes * most / config.num_workers + weights > machine.available_bytes:
        text = f"{text}, and the autoscaler may start {most}: lower autoscaling.max"
        return Finding("memory", Verdict.WARNING, text)
    is_elsewhere = config.generate.device == "cuda" and config.generate.residency == "device"
    kv_bytes = 0 if is_elsewhere else config.generate.num_groups * config.generate.kv_memory_bytes
    if needed + kv_bytes > machine.available_bytes:
        text = f"{text} and {kv_bytes / GIB:.1f} GiB for KV: lower generate.kv_memory_bytes"
        return Finding("memory", Verdict.WARNING, text)
    return Finding("memory", Verdict.OK, text)


def report_profile(plan: ClusterPlan) -> Finding:
    """Report the rates of an engine's device on this machine, on which predictions are based until a model's costs are
    measured."""
    _, engine = worker_profiles(plan)
    return Finding("profile", Verdict.OK, str(engine))


def check_shm(config: ClusterConfig, machine: Machine) -> Finding:
    """Check that /dev/shm has enough free space for Ray's object store."""
    free, needed = machine.shm_bytes // 2**20, config.ray.object_store_mib
    text = f"{free} MiB free, {needed} MiB for Ray's object store"
    if free < needed:
        return Finding("/dev/shm", Verdict.FAILED, f"{text}: enlarge it (docker: --shm-size), or free some")
    return Finding("/dev/shm", Verdict.OK, text)


def check_instruction_set(machine: Machine) -> Finding:
    """Warn when no native kernels are built for this processor. Baton then uses torch's operators, which are slower."""
    if machine.instruction_set is None:
        text = "native kernels are not built: torch's operators are used, several times slower; install a C++ compiler"
        return Finding("instruction set", Verdict.WARNING, f"{text}, and install Baton again")
    return Finding("instruction set", Verdict.OK, f"native kernels for {machine.instruction_set}")


def check_port(config: ClusterConfig) -> Finding:
    """Check that the configured ports on this machine are free: the orchestrator's port for clients, its port for
    metrics, and the port of the OpenAI API over HTTP. The last two are checked only if they are configured."""
    fields = [("orchestrator", "port")]
    fields += [("orchestrator", "metrics_port")] if config.orchestrator.metrics_port > 0 else []
    fields += [("http", "port")] if config.http.port >= 0 else []
    found = []
    for section, field in fields:
        host, port = getattr(config, section).host, getattr(getattr(config, section), field)
        if (why := _why_taken(host, port)) is not None:
            remedy = f"set {section}.host and {section}.{field}; port 0 takes any free one"
            text = f"{join_address(host, port)} cannot be listened on ({why}): {remedy}"
            return Finding("port", Verdict.FAILED, text)
        found.append(join_address(host, port))
    return Finding("port", Verdict.OK, f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} free")


def _why_taken(host: str, port: int) -> str | None:
    """Return the reason why no process can listen on the address; None if it is free."""
    try:
        address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: a closed port is free
            probe.bind(address[4])
    except OSError as error:
        return str(error.strerror)
    return None


def measure_rates(plan: ClusterPlan, machine: Machine) -> Finding:
    """Measure the rates of this machine on which the speed of generation depends, as `baton plan --hardware here` does.
    Takes some seconds and uses all configured threads. Therefore `baton serve` does not run this check."""
    from deploy.machine.probe import measure  # imports torch

    num_threads = use_threads(plan.config.generate.num_threads)
    formats = plan.config.model
    try:
        shape, memory_bytes = plan.model.shape(formats.dtype), machine.available_bytes
        measured = measure(shape, formats.dtype, num_threads, memory_bytes, weights=formats.weights)
    except BatonError as error:
        return Finding("rates", Verdict.WARNING, f"not measured: {error}")
    text = f"{measured.chip} ({num_threads} thread{'s' if num_threads > 1 else ''})"
    if measured.doubt:
        return Finding("rates", Verdict.WARNING, f"{text}; {measured.doubt}")
    return Finding("rates", Verdict.OK, text)


def measure_kernels() -> Finding:
    """Measure the kernels that can compute linear layers in bf16 on this machine, and report the kernels in use. Takes
    some seconds."""
    from baton.modeling.kernels.choosing import RATED_ROWS, linear_rates  # imports torch, as the next import does
    from baton.modeling.kernels.process_kernels import KERNELS

    rates, bare = linear_rates()
    rows = ", ".join(map(str, RATED_ROWS))
    ways = "; ".join(f"{way} {', '.join(f'{rate / 1e9:.3g}' for rate in found)}" for way, found in rates.items())
    text = f"{KERNELS.choice}; GFLOP/s of a core in layers of {rows} rows: {ways}; bare product {bare / 1e9:.3g}"
    return Finding("kernels", Verdict.OK, text)

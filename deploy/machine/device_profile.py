"""Measures the profile of a node's device (`baton.planning.device_profile`) and keeps it in a file. All predictions
begin with the costs that follow from profiles.

`python -m deploy.machine.device_profile` measures what is not kept yet and prints it. A profile is measured once for
each kind of device and each dtype, and kept in a file next to the choice of kernels. The file of a CPU describes one
core, and that of a GPU the whole GPU, under the limit that CUDA MPS sets. `deploy.machine.this_machine` runs this
command before the launcher's machine is first used. A worker on a GPU, or on a node of a Ray that Baton did not start,
runs it before it loads its model. All other workers use nominal rates if no profile is kept. `baton calibrate` measures
a profile again, for longer. Reading a profile does not import torch.

Every rate is measured in two halves of equal length. If the halves differ too much, both are repeated. If they differ
again, nothing is kept, and the device is not measured for an hour. On a GPU, this applies to all rates. On a CPU, it
applies to the rates of one core, which are measured in processor time, because other processes disturb processor time
little. Each operation is then timed on all cores, in elapsed time, because each core is slower when all cores compute.
The kept rate of a core is the rate of all cores divided by their number. It is at least half of the rate measured on
one core, so that a busy machine does not make it too low.
"""

import argparse
import fcntl
import logging
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.kernels import native
from baton.modeling.kernels.processor import processor_kind
from baton.planning.cost_model import LinkModel
from baton.planning.device_profile import DeviceProfile, load, nominal_core, nominal_gpu, save
from baton.planning.gpus import gpu_rank
from baton.planning.hardware import Hardware, cpu_rank
from baton.planning.model_shape import ModelShape
from baton.process.cores import cpu_quota
from baton.process.memory import free_bytes, memory_bytes
from baton.process.topology import computing_cpus, read_nodes, usable_cpus
from baton.settings.place import WorkerPlace
from deploy.config.environment import mps_percentage, use_threads

logger = logging.getLogger(__name__)

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
"""Number of bytes of one value, for each dtype."""
_CPU_SHAPE = ModelShape(30, 576, 9, 3, 64, ffn=1536, vocab=49152)  # smollm2-135m
_GPU_SHAPE = ModelShape(32, 4096, 32, 8, 128, ffn=14336, vocab=128256)  # llama-3-8b
_TINY_SHAPE = ModelShape(8, 256, 4, 4, 64, ffn=512, vocab=512)
"""Model with layers so small that a GPU waits for the launches of their kernels."""
_CPU_PROMPT = (256, 2048)
"""Number of tokens of the prefill chunk with which a CPU is measured, and of the keys that each token attends to."""
_GPU_TOKENS, _GPU_PROMPT = 2048, (8192, 8192)
"""Number of tokens with which the products of a GPU are measured, and sizes as in `_CPU_PROMPT` for its attention."""
_GPU_DECODES = (32, 4096)
"""Number of sequences of the measured decode attention, and number of keys of each."""
_TINY_TOKENS = 16
_SECONDS = 0.12
"""Minimum time in seconds that a half of the measurement spends on each rate, if a profile is missing."""
_NUM_TIMINGS = 12
"""Number of timings in both halves of a measurement of a CPU together. A measurement of a GPU has ten."""
NUM_HALVES = 4
"""Maximum number of halves that are measured for a profile: two, and two more if the first two differ."""
_AGREEMENT = 0.2
"""Largest fraction by which the two halves of a measurement may differ."""
_RETRY_S = 3600.0
"""Time in seconds after a failed measurement in which the device is not measured again."""
Progress = Callable[[int], None]
"""Function that is called, as the work advances, with numbers of halves that add up to NUM_HALVES for each dtype."""
Half = tuple[list[float], DeviceProfile]
"""Result of half a measurement: the rates that must agree with those of the other half, and the profile."""


def kept_path(device: str, dtype_bytes: int, gpu: str = "") -> Path:
    """Return the path of the file with the measured profile of a device. It depends on the processor, the torch version
    and the build of the kernels, and for "cuda" on the GPU's name and on the limit of CUDA MPS."""
    kind = re.sub(r"[^a-z0-9]+", "-", f"{gpu}{_mps()}".lower()) if device == "cuda" else "cpu"
    choice = native.choice_path()
    return choice.with_name(choice.name.replace("choice-", f"profile-{kind}-{dtype_bytes}-"))


def kept_profile(device: str, dtype_bytes: int, gpu: str = "") -> DeviceProfile | None:
    """Return the profile that was measured earlier for values of `dtype_bytes` bytes: of one core, or of the GPU `gpu`.
    Return None if no profile was measured, or if its file cannot be read."""
    path = kept_path(device, dtype_bytes, gpu)
    try:
        return load(path) if path.exists() else None
    except ConfigError as error:
        logger.warning("predictions begin with assumed rates: %s", error)
        return None


def gpu_profile(gpu: str, dtype_bytes: int, share: float = 1.0) -> DeviceProfile:
    """Return the profile of a worker on the GPU `gpu` of this machine, of which Ray gives it the fraction `share`. Its
    rates are nominal unless they were measured earlier."""
    whole = kept_profile("cuda", dtype_bytes, gpu) or nominal_gpu(gpu, dtype_bytes)
    part = "" if share == 1 else f", share {share:g}"
    return replace(whole, name=f"{whole.name}{part}{_mps()}")


def cpu_profile(num_threads: int, dtype_bytes: int, device: str = "cpu") -> DeviceProfile:
    """Return the profile of a worker on the cores of this machine, whose rates are nominal unless they were measured
    earlier. It has `num_threads` threads, or fewer cores if the container has a lower CPU quota. Workers with the
    `device` "emulated" compute at the same rates."""
    core, quota, capacity = kept_profile("cpu", dtype_bytes) or nominal_core(dtype_bytes), cpu_quota(), memory_bytes()
    limit = "" if quota == math.inf else f", quota of {quota:g} cores"
    return replace(
        core,
        name=f"{processor_kind()}, {num_threads} thread{'s' if num_threads > 1 else ''}{limit}",
        device="emulated" if device == "emulated" else "cpu",
        hardware=core.hardware.on_cores(min(num_threads, quota), core.shared_bandwidth),
        memory_bytes=capacity,
        used_bytes=max(capacity - free_bytes(), 0),
    )


def worker_profile(place: WorkerPlace) -> DeviceProfile:
    """Return the profile of the worker in this process, which has not loaded its model yet. If the worker computes on a
    GPU whose rates are not kept, they are measured first. Blocks. Raises ConfigError if there is no GPU."""
    dtype_bytes = DTYPE_BYTES[place.dtype]
    if place.device != "cuda":
        return cpu_profile(use_threads(place.num_threads), dtype_bytes, place.device)
    import torch

    gpu = gpu_here()
    if must_measure("cuda", dtype_bytes, gpu):
        measure_in_child("cuda", place.dtype)
    free, capacity = torch.cuda.mem_get_info()
    profile = gpu_profile(gpu, dtype_bytes, place.gpu_share)
    return replace(profile, memory_bytes=capacity, used_bytes=capacity - free - torch.cuda.memory_reserved())


def measure_in_child(device: str, dtype: str) -> None:
    """Measure a profile that is not kept yet in a child process, which releases all memory at its end. If that fails, a
    warning is logged."""
    if reason := failure_of("deploy.machine.device_profile", "--device", device, "--dtype", dtype):
        logger.warning("%s: nominal rates are used, because the device could not be measured: %s", device, reason)


def failure_of(module: str, *arguments: str) -> str:
    """Run a module as a program. Return the last line of its error output if it failed, or an empty string if it
    succeeded."""
    command, nothing = [sys.executable, "-m", module, *arguments], subprocess.DEVNULL
    run = subprocess.run(command, check=False, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, text=True)
    return (run.stderr.strip().splitlines() or ["no message"])[-1] if run.returncode else ""


def must_measure(device: str, dtype_bytes: int, gpu: str = "") -> bool:
    """Return True if no profile of the device is kept that this version reads, and the device was not measured in vain
    within the last hour."""
    tried = kept_path(device, dtype_bytes, gpu).with_suffix(".tried")
    is_tried = tried.exists() and time.time() - tried.stat().st_mtime < _RETRY_S
    return not is_tried and kept_profile(device, dtype_bytes, gpu) is None


def keep_profiles(
    device: str, dtypes: Sequence[str], gpu: str = "", *, seconds: float | None = None, done: Progress = lambda _: None
) -> list[str]:
    """Measure the profiles of these dtypes for about `seconds` seconds each, and replace the kept ones. `seconds` None:
    measure only those that must be measured, in a short time. Return the dtypes that were measured and whose halves
    agreed; for others, the kept profile stays. `done` is called as by `measure` for each dtype.

    If another process of this node measures at the same time, wait for it and use its result. Raises ConfigError if a
    profile cannot be written.
    """
    kept = []
    half_s = _SECONDS if seconds is None else seconds / _NUM_TIMINGS
    lock_path = native.choice_path().with_name("profiles.lock")
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
        for dtype in dtypes:
            if seconds is None and not must_measure(device, DTYPE_BYTES[dtype], gpu):
                continue
            path = kept_path(device, DTYPE_BYTES[dtype], gpu)
            try:
                if (profile := measure(device, dtype, half_s, done)) is not None:
                    save(profile, path)
                    kept.append(dtype)
            finally:
                if dtype not in kept and kept_profile(device, DTYPE_BYTES[dtype], gpu) is None:
                    path.with_suffix(".tried").touch()
    return kept


def measure(device: str, dtype: str, seconds: float, done: Progress = lambda _: None) -> DeviceProfile | None:
    """Measure the rates of the GPU if `device` is "cuda", else of one CPU core while all usable cores compute. Each
    half spends at least `seconds` seconds on each rate. Return their profile for this dtype, or None if two halves
    differed twice. `done` is called with the number of halves that were measured or became unnecessary, NUM_HALVES in
    total. Sets the number of torch's threads. Blocks."""
    half = partial(_gpu_half if device == "cuda" else _core_half, dtype, seconds)
    for num_left in range(NUM_HALVES - 2, -1, -2):  # each pass measures two
        first, _unused = half()
        done(1)
        second, profile = half()
        done(1)
        if all(abs(a - b) <= _AGREEMENT * max(a, b) for a, b in zip(first, second, strict=True)):
            done(num_left)
            return profile
    logger.warning("two measurements in %s differ by over %.0f %%: free the machine", dtype, 100 * _AGREEMENT)
    return None


def _core_half(dtype: str, seconds: float) -> Half:
    """Measure rates of products, of attention and of reading memory: first those of one core, then those of all cores
    together."""
    import torch

    from baton.modeling.forward.attention import default_kernel
    from deploy.machine.prefill_rates import CPU, attention_work, layer_work, rate_of, read_work

    kind = getattr(torch, dtype)
    num_cores = sum(map(len, computing_cpus(read_nodes(usable_cpus()))))
    num_threads = max(int(min(num_cores, cpu_quota())), 1)
    attention = attention_work(default_kernel(CPU, kind), _CPU_SHAPE, _CPU_PROMPT, kind)
    works = layer_work(_CPU_SHAPE, _CPU_PROMPT[0], kind), attention, read_work(num_threads)
    torch.set_num_threads(1)
    alone = [rate_of(work, seconds, time.thread_time) for work in works]
    torch.set_num_threads(num_threads)
    together = [rate_of(work, seconds) for work in works]
    each = zip(alone, together, strict=True)
    linear, pair, _ = (min(max(whole / num_threads, core / 2), core) for core, whole in each)
    assumed, memory = cpu_rank(1, DTYPE_BYTES[dtype]), min(alone[2], together[2])
    core = replace(assumed, linear_flops=linear, pair_flops=pair, memory_bandwidth=memory)
    return alone, DeviceProfile("CPU core", "cpu", core, shared_bandwidth=together[2], is_measured=True)


def _gpu_half(dtype: str, seconds: float) -> Half:
    """Measure a GPU's rates of products, of attention, of reading memory, of launching layers and of copies from the
    host. KV between workers passes through host memory, so these copies limit the link."""
    import torch

    from baton.modeling.device.making import make_device
    from baton.modeling.forward.triton.attention import triton_kernel
    from deploy.machine import prefill_rates as rates

    device, kind, name = make_device("cuda"), getattr(torch, dtype), torch.cuda.get_device_name()
    where, nominal = device.torch_device, gpu_rank(name, DTYPE_BYTES[dtype])
    works = (
        rates.layer_work(_GPU_SHAPE, _GPU_TOKENS, kind, where),
        rates.attention_work(triton_kernel, _GPU_SHAPE, _GPU_PROMPT, kind, where),
        rates.decode_work(_GPU_SHAPE, _GPU_DECODES, kind, where),
        rates.launch_work(_TINY_SHAPE, _TINY_TOKENS, dtype, device),
        rates.copy_work(where),
    )

    def clock() -> float:
        torch.cuda.synchronize(where)
        return time.perf_counter()

    found = [rates.rate_of(work, seconds, clock) for work in works]
    linear, pair, memory, layers, copies = found
    link = LinkModel(nominal.link.latency_s, min(nominal.link.bandwidth, copies))
    hardware = Hardware(linear, pair, link, memory_bandwidth=memory, fixed_s=nominal.fixed_s, issue_s=1 / layers)
    return found, DeviceProfile(name, "cuda", hardware, memory, is_measured=True)


def _mps() -> str:
    """Return the part of a GPU's identity that names the limit of CUDA MPS; empty if there is none."""
    return f", {mps_percentage()} % of MPS" if mps_percentage() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the profiles that are not kept yet, and print all of them. Return the exit status: 1 if a profile could
    not be kept."""
    parser = argparse.ArgumentParser(description="Measures the profile of this node's device and keeps it.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device to measure (default: cpu)")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, help="dtype to measure with (default: all)")
    args = parser.parse_args(argv)
    dtypes = [args.dtype] if args.dtype else [*DTYPE_BYTES]
    gpu = gpu_here() if args.device == "cuda" else ""
    keep_profiles(args.device, dtypes, gpu)
    kept = [kept_profile(args.device, DTYPE_BYTES[dtype], gpu) for dtype in dtypes]
    for dtype, profile in zip(dtypes, kept, strict=True):
        print(f"{dtype}: {profile or 'not kept'}")
    return 0 if all(kept) else 1


def gpu_here() -> str:
    """Return the name of the first GPU that this process sees. Raises ConfigError if there is none."""
    import torch

    from baton.modeling.device.making import require_cuda

    require_cuda()
    return torch.cuda.get_device_name()


if __name__ == "__main__":
    sys.exit(main())

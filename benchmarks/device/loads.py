"""Defines the loads of an engine on a device, and reports the engine's times compared with their minimum.

The minimum time of a step is max(time to read its bytes at the rate of a copy, time to compute the operations of its
prompt tokens at the rate of a large matrix product).
"""

import json
import statistics
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from baton.modeling.forward.decoder import Decoder
from benchmarks.device.kernels import Measured, Rates
from benchmarks.device.model import Shape
from benchmarks.device.profiles import Compilation, compilations, engine_stacks, gpu_kernels
from benchmarks.device.served import TOGETHER, Load, LoggedEngine, Served, Step, running_engine, serve
from generate_workers.config import EngineConfig

MOST_SHOWN = 12
"""A profile reports at most this number of functions, and at most this number of kernels."""


@dataclass(frozen=True)
class Setting:
    """Configuration of one engine, and the loads that this engine runs one after the other."""

    name: str
    config: EngineConfig
    loads: tuple[Load, ...]
    profiled: Load | None = None
    """Load during which the engine's stack is sampled and its kernels are traced. Profiling increases the measured
    times. None: no profile."""
    warm_s: float = 6.0
    """Seconds from the start of the profiled load to the start of the profile."""


_WIDE = {"num_slots": 256, "max_slot_tokens": 1280, "max_waiting": 1024, **TOGETHER}
_LONG = {"num_slots": 8, "max_slot_tokens": 8704, **TOGETHER}
_SIXTY_FOUR = Load(64, 1024, 128, 3)
FULL = (
    Setting(
        "auto",
        EngineConfig(**_WIDE),
        (Load(16, 1024, 128, 3), Load(1, 1024, 128, 3), _SIXTY_FOUR, Load(256, 1024, 128, 2)),
        _SIXTY_FOUR,
    ),
    Setting(
        "off",
        EngineConfig(**_WIDE, speculation="off"),
        (Load(16, 1024, 128, 3), _SIXTY_FOUR, Load(256, 1024, 128, 2)),
        _SIXTY_FOUR,
    ),
    Setting("long", EngineConfig(**_LONG, speculation="off"), (Load(4, 8192, 64, 2),)),
)
"""Engine settings to measure. They differ in the mode of speculation and in the prompt length. Each setting starts a
new engine, which has served no request before its first load."""
QUICK = (Setting("auto", EngineConfig(num_slots=2, max_slot_tokens=64), (Load(2, 24, 4, 2),), Load(2, 24, 4, 2), 0.0),)
_WINDOW_S, _LIMIT_S = 1.5, 40.0


def measure(
    decoder: Decoder, shape: Shape, rates: Rates, settings: tuple[Setting, ...], folder: Path | None
) -> Iterator[Measured]:
    """Run the loads of all settings and yield their results. If `folder` is given, write the steps, Triton's
    compilations and a trace to files in it."""
    for setting in settings:
        with compilations() as compiled, running_engine(decoder, setting.config) as engine:
            yield from _total({"setting": setting.name, "when": "start"}, compiled)
            for number, load in enumerate(setting.loads):
                compiled.clear()
                served = serve(engine, load, _LIMIT_S)
                case: dict[str, object] = {"setting": setting.name, "users": load.users, "prompt": load.prompt_tokens}
                yield from _load_times(case, served, shape, rates)
                yield from _total(case, compiled)
                if folder is not None:
                    _write(folder / f"steps-{setting.name}.jsonl", case, served, compiled, is_first=not number)
            if setting.profiled is not None:
                yield from _profile(setting, engine, is_gpu=decoder.weights.device.type == "cuda", folder=folder)


def _load_times(case: dict[str, object], served: Served, shape: Shape, rates: Rates) -> Iterator[Measured]:
    """Yield the times of a load. Times of whole steps include only steps in which all users' sequences decode, if there
    are any."""
    load, least_s = served.load, partial(_least_s, shape=shape, rates=rates)
    prompt_ms = 1e3 * shape.prefill_flops(load.prompt_tokens) / rates.product
    yield Measured(case, "load_ms", 1e3 * served.took_s, "floor", 1e3 * sum(map(least_s, served.steps)))
    first_s, gap_s = sorted(served.first_s), sorted(served.gap_s)
    for share in (0.5, 0.99):
        name = f"{100 * share:g}"
        if first_s:
            yield Measured(case, f"ttft_p{name}_ms", 1e3 * _at(first_s, share), "a prompt alone", prompt_ms)
        if gap_s:
            yield Measured(case, f"gap_p{name}_ms", 1e3 * _at(gap_s, share), "largest gap", 1e3 * gap_s[-1])
    whole = [step for step in served.steps if step.device_s]
    full = [step for step in whole if step.num_rows == load.users] or whole
    launched = [step for step in served.steps if not step.device_s]
    for name, all_steps, steps in (("whole", whole, full), ("launched", launched, launched)):
        if not steps:
            continue
        part = {**case, "steps": name, "share": round(len(all_steps) / len(served.steps), 2)}
        took_ms = _median_ms(step.took_s for step in steps)
        yield Measured(part, "step_ms", took_ms, "floor", _median_ms(map(least_s, steps)))
        yield Measured(part, "step_ms", took_ms, "on device", _median_ms(step.device_s for step in steps))
        yield Measured(part, "step_ms", took_ms, "speculation", _median_ms(step.draft_s for step in steps))
        yield Measured(part, "step_ms", took_ms, "batching", _median_ms(step.batch_s for step in steps))


def _profile(setting: Setting, engine: LoggedEngine, *, is_gpu: bool, folder: Path | None) -> Iterator[Measured]:
    """Yield the most frequent functions on the engine's stack and the kernels with the longest GPU time, each as time
    within the profile's window."""
    assert setting.profiled is not None
    name, stacks, kernels = setting.name, dict[str, int](), dict[str, float]()

    def watch() -> None:
        threading.Event().wait(setting.warm_s)
        stacks.update(engine_stacks(_WINDOW_S))
        if is_gpu:
            kernels.update(gpu_kernels(_WINDOW_S, None if folder is None else folder / f"trace-{name}.json.gz"))

    serve(engine, setting.profiled, _LIMIT_S, watch)
    samples, window_ms = sum(stacks.values()), 1e3 * _WINDOW_S
    for function, count in sorted(stacks.items(), key=lambda each: -each[1])[:MOST_SHOWN]:
        case: dict[str, object] = {"setting": name, "function": function}
        yield Measured(case, "stack_ms", window_ms * count / samples, "window", window_ms)
    if kernels:
        yield Measured(
            {"setting": name, "kernel": "all"}, "kernel_ms", 1e3 * sum(kernels.values()), "window", window_ms
        )
    for kernel, seconds in list(kernels.items())[:MOST_SHOWN]:
        short = kernel.split("(")[0][:48].replace(",", ";")
        yield Measured({"setting": name, "kernel": short}, "kernel_ms", 1e3 * seconds, "window", window_ms)


def _least_s(step: Step, shape: Shape, rates: Rates) -> float:
    return max(step.num_bytes / rates.memory, 2.0 * shape.num_weights * step.num_prefill_tokens / rates.product)


def _total(case: dict[str, object], compiled: list[Compilation]) -> Iterator[Measured]:
    """Yield the total time in which Triton compiled kernels, and the total time in which it loaded them from its cache.
    A time without kernels is omitted."""
    for name, was_cached in {"compiled": False, "loaded": True}.items():
        taken_ms = [1e3 * each.took_s for each in compiled if each.was_cached is was_cached]
        if taken_ms:
            yield Measured({**case, "kernels": len(taken_ms)}, f"{name}_ms", sum(taken_ms), "longest", max(taken_ms))


def _write(file: Path, case: dict[str, object], served: Served, compiled: list[Compilation], *, is_first: bool) -> None:
    with file.open("w" if is_first else "a") as out:
        for step in served.steps:
            numbers = {name: round(value, 6) for name, value in asdict(step).items()}
            print(json.dumps({"users": case["users"], **numbers}), file=out)
        for each in compiled:
            at_s = round(each.at_s - served.began_s, 6)
            print(json.dumps({"users": case["users"], **each._asdict(), "at_s": at_s}), file=out)


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _median_ms(seconds: Iterable[float]) -> float:
    return 1e3 * statistics.median(seconds)

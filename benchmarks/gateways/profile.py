"""Profiler that samples the stack of a process's main thread every few milliseconds of processor time.

Each sample is counted once for the innermost Python function, and once for each of its callers on the stack. The time
of C code, such as gRPC and protobuf, counts for the Python function that called it.
"""

import gc
import signal
import time
from collections import Counter
from types import FrameType

_PERIOD_S = 0.004
"""Seconds of processor time between two samples. The kernel's timers do not support a shorter period."""
_NUM_SHOWN = 25


class Profile:
    """Samples of the main thread's stack, taken between `start` and `stop`. Both must be called on the main thread."""

    def __init__(self) -> None:
        self._own: Counter[str] = Counter()
        self._below: Counter[str] = Counter()
        self._num_samples = 0
        self._began = (0.0, 0.0)
        self._collecting_s = 0.0
        """Seconds spent on garbage collection."""

    def start(self) -> None:
        """Start sampling the stack."""
        self._began = (time.process_time(), time.thread_time())
        gc.callbacks.append(self._time_collection)
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _PERIOD_S, _PERIOD_S)

    def stop(self) -> str:
        """Stop sampling, and return the profile as text."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        gc.callbacks.remove(self._time_collection)
        process_s, thread_s = time.process_time() - self._began[0], time.thread_time() - self._began[1]
        head = (
            f"{process_s:.2f} s of processor time, {thread_s:.2f} of them on the loop's thread; "
            f"{self._collecting_s:.2f} s of collecting garbage; {self._num_samples} samples"
        )
        return "\n".join([head, "", "  own  function", *self._lines(self._own), ""]) + "\n".join(
            ["", "with callees  function", *self._lines(self._below), ""]
        )

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        self._num_samples += 1
        seen: set[str] = set()
        while frame is not None:
            name = _name_of(frame)
            if not seen:
                self._own[name] += 1
            if name not in seen:
                seen.add(name)
                self._below[name] += 1
            frame = frame.f_back

    def _time_collection(self, phase: str, _info: dict[str, int]) -> None:
        now_s = time.thread_time()
        self._collecting_s += now_s if phase == "stop" else -now_s

    def _lines(self, counts: "Counter[str]") -> list[str]:
        total = max(self._num_samples, 1)
        return [f"{100 * count / total:5.1f}  {name}" for name, count in counts.most_common(_NUM_SHOWN)]


def _name_of(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_firstlineno} {code.co_qualname}"

"""Measures and stores the rates of one core of this machine at prefill and at reading memory. The first cost
predictions are based on these rates.

`python -m deploy.machine.core_rates` measures the rates in a few seconds, once for each kind of processor, and writes
them to a file next to the built kernels. `deploy.machine.this_machine` runs this command before the first use. Reading
the file does not import torch. The rates are used until `baton calibrate` has measured a model's own costs.

Matrix products and attention are timed twice. The first measurement uses one core and counts the processor time of the
thread, because other processes disturb processor time little. The second measurement uses all cores and counts elapsed
time, because each core is slower when all cores compute. The stored rate of a core is the rate of all cores divided by
their number. It is at least half of the rate measured on one core, so that a busy machine does not make it too low.
"""

import json
import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.kernels import native
from baton.planning.hardware import CoreRates
from baton.planning.model_shape import ModelShape
from baton.process.whole_files import whole

logger = logging.getLogger(__name__)

_SHAPE = ModelShape(30, 576, 9, 3, 64, ffn=1536, vocab=49152)  # smollm2-135m
_DTYPES = {"bfloat16": 2, "float32": 4}
"""Number of bytes of one value, for each dtype with which the rates are measured."""
_TOKENS = 256
"""Number of tokens of the prefill chunk with which the rates are measured."""
_KEYS = 2048
"""Number of keys that each token of the measured prefill chunk attends to."""
_SECONDS = 0.25
"""Minimum time in seconds that is spent on measuring each rate."""


def kept_rates_path() -> Path:
    """Return the path of the file with the measured rates. The path depends on the processor, the torch version and the
    source code of the kernels."""
    choice = native.choice_path()
    return choice.with_name(choice.name.replace("choice-", "rates-"))


def kept_rates(dtype_bytes: int) -> CoreRates | None:
    """Return the rates that were measured earlier on this machine for values of `dtype_bytes` bytes. Return None if no
    rates were measured, or if their file cannot be read."""
    path = kept_rates_path()
    try:
        return CoreRates(**json.loads(path.read_text())[str(dtype_bytes)])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        logger.warning("%s: cannot be read (%s): predictions begin with assumed rates", path, error)
        return None


def measure_core_rates() -> dict[str, CoreRates]:
    """Measure the rates of one core with each dtype. Return the rates by the size in bytes of one value, as text ("2"
    or "4"). Blocks for some seconds."""
    import torch

    from baton.modeling.forward.attention import default_kernel
    from deploy.machine.prefill_rates import WALL, Work, attention_work, layer_work, rate_of, read_rate

    before, num_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))

    def of_a_core(work: Work) -> float:
        torch.set_num_threads(num_cores)
        together = rate_of(work, _SECONDS, WALL) / num_cores
        torch.set_num_threads(1)
        alone = rate_of(work, _SECONDS, time.thread_time)
        return min(max(together, alone / 2), alone)

    try:
        torch.set_num_threads(num_cores)
        together = read_rate(_SECONDS)
        torch.set_num_threads(1)
        alone = min(read_rate(_SECONDS), together)
        found = {}
        for name, num_bytes in _DTYPES.items():
            dtype: torch.dtype = getattr(torch, name)
            kernel = default_kernel(torch.device("cpu"), dtype)
            linear = of_a_core(layer_work(_SHAPE, _TOKENS, dtype))
            attention = of_a_core(attention_work(kernel, _SHAPE, (_TOKENS, _KEYS), dtype))
            found[str(num_bytes)] = CoreRates(linear, attention, alone, together)
        return found
    finally:
        torch.set_num_threads(before)


def keep_rates(rates: dict[str, CoreRates]) -> None:
    """Write the rates to the file that `kept_rates` reads."""
    path = kept_rates_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial:
        partial.write_text(json.dumps({name: asdict(each) for name, each in rates.items()}) + "\n")


def main() -> int:
    """Measure the rates, write them to the file, and print them; return the exit status."""
    rates = measure_core_rates()
    keep_rates(rates)
    for num_bytes, each in rates.items():
        print(f"{num_bytes} bytes a number: {each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

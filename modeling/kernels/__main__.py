"""`python -m modeling.kernels`: build all kernels for this machine and measure which are the fastest.

A model's first use then waits for neither. The exit status is 1 when a kernel cannot be built; the log says why.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch  # noqa: F401 - imported whole before several threads want it: they would find half of it

from modeling.kernels import native
from modeling.kernels.process_kernels import KERNELS

with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each waits for a compiler
    ready = list(pool.map(native.load, native.NAMES))
for name, is_ready in zip(native.NAMES, ready, strict=True):
    print(f"{name}: {'ready' if is_ready else 'not for this machine'}")
print(f"{KERNELS.choice.processor}: {KERNELS.choice}")
sys.exit(not all(ready))

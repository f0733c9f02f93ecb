"""`python -m modeling.kernels`: build all kernels for this machine and measure which are the fastest.

The first use of a model then waits for neither.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import torch  # noqa: F401 - imported whole before several threads want it: they would find half of it

from modeling.kernels import native
from modeling.kernels.process_kernels import KERNELS

with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each waits for a compiler
    ready = list(pool.map(native.load, native.NAMES))
for name, is_ready in zip(native.NAMES, ready, strict=True):
    print(f"{name}: {'ready' if is_ready else 'not for this machine'}")
print(f"{KERNELS.choice.processor}: {KERNELS.choice}")

"""`python -m modeling.kernels`: builds all kernels for this machine, so that no first use has to wait for it."""

import os
from concurrent.futures import ThreadPoolExecutor

from modeling.kernels import native

with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each waits for a compiler
    ready = list(pool.map(native.load, native.NAMES))
for name, is_ready in zip(native.NAMES, ready, strict=True):
    print(f"{name}: {'ready' if is_ready else 'not for this machine'}")

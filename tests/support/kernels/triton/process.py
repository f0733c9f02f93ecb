"""Processes in which tests run Triton kernels: this process if there is a GPU, otherwise a separate process.

Triton reads TRITON_INTERPRET when it is imported, and torch may import it at any time. Therefore, Triton's interpreter
runs in a separate process, and other tests of this process are not affected. This module does not import Triton in the
test's process.
"""

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

Run = Callable[..., Any]
"""Function `run(function, *arguments)`. It calls a function of a module in the process, and returns its result or
raises its error."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Device of the kernels: compiled on a GPU, or interpreted on the CPU."""
_TIMEOUT_S = 300.0


@contextmanager
def process_with(**environment: str) -> Iterator[Run]:
    """Yield a function that calls functions in one new process whose environment has these variables."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_begin, initargs=(environment,)) as pool:
        pool.submit(int).result(_TIMEOUT_S)  # start the process before a test checks for leaks
        yield lambda function, *arguments: pool.submit(function, *arguments).result(_TIMEOUT_S)


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)

"""Where Triton kernels run in tests: in this process on a GPU, else in a process of their own.

Triton asks for TRITON_INTERPRET when it is imported, and torch may import it for reasons of its own. So its interpreter
has a process to itself, and no other test of this process sees it. Nothing here imports Triton in the test's process.
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
"""`run(function, *arguments)`: calls a function of a module, and returns or raises what it does."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels run: compiled for a GPU, or in the interpreter."""
_TIMEOUT_S = 100.0


@contextmanager
def process_with(**environment: str) -> Iterator[Run]:
    """A way to call functions in one new process with these variables in its environment."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_begin, initargs=(environment,)) as pool:
        pool.submit(int).result(_TIMEOUT_S)  # it has begun before a test looks for what it leaves behind
        yield lambda function, *arguments: pool.submit(function, *arguments).result(_TIMEOUT_S)


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)

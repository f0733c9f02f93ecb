"""Calls the C++ kernels, which are built as libraries of C functions that use torch's OpenMP runtime.

A library is not linked to an OpenMP runtime. It uses the runtime that torch has loaded, so kernels and torch share one
thread pool.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Function = Callable[..., None]

_TYPES: dict[str, Any] = {  # ctypes' common base is not public
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "t": ctypes.c_int,
    "d": ctypes.c_double,
    "b": ctypes.c_bool,
    "s": ctypes.c_char_p,
}
"""Argument types of the libraries' functions, by the letter that stands for each type in a signature: pointer, number,
number of threads, double, bool, string."""


class Library:
    """Library of kernels. Raises OSError if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        _share_openmp()
        self._library = ctypes.CDLL(str(path))

    def function(self, name: str, arguments: str) -> Function:
        """Return the function `name` of the library. `arguments` contains one letter for the type of each argument. The
        function runs without the GIL. It raises RuntimeError with the kernel's message if the kernel rejects its
        arguments."""
        function: Any = self._library[f"baton_{name}"]
        function.argtypes = [_TYPES[letter] for letter in arguments]
        function.restype = ctypes.c_char_p
        function.errcheck = _raise_message
        checked: Function = function
        return checked

    def says(self, name: str) -> bool:
        """Call the function `name` of the library, which has no arguments, and return its boolean result."""
        return bool(self._library[f"baton_{name}"]())

    def destructor(self, name: str) -> Callable[[int], None]:
        """Return the library's function `name`. This function frees an object that a kernel has created."""
        function = self._library[f"baton_{name}"]
        function.argtypes, function.restype = [ctypes.c_void_p], None
        return function


def _raise_message(message: bytes | None, function: Any, arguments: Any) -> None:
    if message is not None:
        raise RuntimeError(message.decode())


class _Symbol(ctypes.Structure):
    """Struct Dl_info of dlfcn.h, which `dladdr` fills: path and base address of the library that contains a symbol, and
    the symbol's name and address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@functools.cache
def _share_openmp() -> None:
    """Make the OpenMP runtime that torch uses visible to libraries that are loaded after this call. Raises OSError if
    torch has none."""
    try:
        of_torch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except AttributeError as error:
        raise OSError(f"torch has no OpenMP runtime that GCC's code can use: {error}") from error
    found = _Symbol()
    ctypes.CDLL(None).dladdr(of_torch, ctypes.byref(found))
    ctypes.CDLL(found.file.decode(), ctypes.RTLD_GLOBAL)

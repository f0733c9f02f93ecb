"""Child process that checks forms of structured outputs by compiling them. A form is a JSON schema, a regular
expression, a grammar or a list of texts. `baton.text.form_prover` starts the process. A crash of the process does not
affect the prover.

The time, memory and stack that a form needs cannot be predicted from its size. The child process has limits on all
three. If a form exceeds a limit, only the child process ends.

`python -m baton.text.form_child FD` reads JSON messages from a socket. The first message contains the model's
tokenizer, its end-of-sequence tokens and the time limit. Each further message contains one form, which is answered
before the next message is read.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from baton.errors import InvalidArgumentError
from baton.limits import FORM_MEMORY_BYTES, FORM_STACK_BYTES
from baton.sampling_params import StructuredOutput
from baton.text.form_bounds import check_bounds
from baton.text.grammars import Grammars

_ARENA_MAX = -8
"""Parameter of glibc's `mallopt` that sets the maximum number of arenas. Each arena takes 64 MiB of address space."""
_NICE = 5
"""Nice value of the child process. It gives the processes that serve requests on the same cores a higher priority."""


class _Allocated(ctypes.Structure):
    """Structure `mallinfo2` of glibc, with all fields in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks mapped usmblks fsmblks used free keep".split()
    ]


def main(fd: int) -> None:
    """Read and answer messages on the socket with the file descriptor `fd`, until the other side closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    os.nice(_NICE)
    _use_one_arena()
    connection = Connection(fd)
    with contextlib.suppress(EOFError):
        tokenizer, eos_token_ids, cpu_s = json.loads(connection.recv_bytes())
        grammars = Grammars(lambda: tokenizer, eos_token_ids, max_bytes=0)
        with contextlib.suppress(InvalidArgumentError):
            grammars.load()  # a model that supports no forms raises this again for each form
        _limit_memory()
        threading.stack_size(FORM_STACK_BYTES)
        with Path(os.devnull).open("wb") as nowhere:  # the compiler writes a long report when it aborts
            os.dup2(nowhere.fileno(), 2)
        connection.send_bytes(b"ready")
        while True:
            fields, outputs = json.loads(connection.recv_bytes())
            answer = dict[str, Any]()
            thread = threading.Thread(target=_answer, args=(answer, grammars, fields, outputs))
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
            thread.start()
            thread.join()
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send_bytes(json.dumps(answer).encode())


def _answer(answer: dict[str, Any], grammars: Grammars, fields: dict[str, Any], outputs: list[list[int]]) -> None:
    """Compile a form, and check that each resumed output of the request consists of tokens that the form allows. Write
    the result into `answer`."""
    allocated = _allocated_bytes()
    before = allocated()
    try:
        form = StructuredOutput(**{**fields, "choice": tuple(fields.get("choice", ()))})
        check_bounds(form)
        grammar = grammars.compile(form)
        answer["bytes"] = max(0, allocated() - before)
        for output_ids in outputs:
            grammar.matcher().consume(output_ids)
    except InvalidArgumentError as error:
        answer["error"] = str(error)
    except MemoryError:
        os.abort()  # as when the compiler has no memory


def _use_one_arena() -> None:
    """Make all threads allocate in one arena. With an arena for each thread, the address space would reach the memory
    limit after some tens of forms, regardless of their size."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_ARENA_MAX, 1)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + FORM_STACK_BYTES + FORM_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allocated_bytes() -> Callable[[], int]:
    """Return a function that returns the number of bytes that the process has allocated. It is exact
    only with glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    library.mallinfo2.restype = _Allocated

    def allocated() -> int:
        found = library.mallinfo2()
        return int(found.used + found.mapped)

    return allocated


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Child process with a thread that is named like a generation engine's thread, for tests that stop the thread or slow
it down from outside."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

SCRIPT = """
import signal, sys, threading
from baton.process.thread_names import show_thread_name

def echo():
    show_thread_name()
    for line in sys.stdin:
        print(line, end="", flush=True)

def tell(*_):
    print("alive", file=sys.stderr, flush=True)

signal.signal(signal.SIGUSR1, tell)
thread = threading.Thread(target=echo, name="generate-engine", daemon=True)
thread.start()
{rest}
"""
WAITS = "while True: signal.pause()"
SPINS = "while True: pass"


@contextlib.contextmanager
def child(rest: str = WAITS) -> Iterator[subprocess.Popen[str]]:
    """Run a child process. Its main thread runs the code `rest`, and writes "alive" to standard error at SIGUSR1. Its
    thread `generate-engine` copies lines from standard input to standard output; it has copied one line when this
    yields."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SCRIPT.format(rest=rest)], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("first\n")
            process.stdin.flush()
            assert process.stdout.readline() == "first\n"
            yield process
        finally:
            process.kill()

"""Processes of a node do not measure its device at the same time."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("cache")]

SCRIPT = """
import fcntl, sys
from baton.planning.device_profile import nominal_core
from deploy.machine import device_profile

def measure(device, dtype, seconds, done):
    print("measures", flush=True)
    return nominal_core(2) if sys.stdin.readline() == "agree\\n" else None

def flock(file, operation):
    try:
        lock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waits", flush=True)
        lock(file, operation)

lock, fcntl.flock, device_profile.measure = fcntl.flock, flock, measure
device_profile.keep_profiles("cpu", ["bfloat16"])
print(device_profile.kept_profile("cpu", 2) is not None, flush=True)
"""


@pytest.mark.parametrize(("halves", "is_kept"), [("agree", "True"), ("differ", "False")])
def test_a_process_that_waited_for_a_measurement_makes_none(halves: str, is_kept: str) -> None:
    command, pipe = [sys.executable, "-c", SCRIPT], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == "measures\n"
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waits\n"
            first.stdin.write(f"{halves}\n")
            first.stdin.flush()
            assert first.stdout.read() == second.stdout.read() == f"{is_kept}\n"


def test_the_lock_of_a_process_that_died_is_free() -> None:
    command, pipe = [sys.executable, "-c", SCRIPT], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "measures\n"
        first.kill()
    run = subprocess.run(command, check=True, input="agree\n", capture_output=True, text=True)
    assert run.stdout.splitlines() == ["measures", "True"]

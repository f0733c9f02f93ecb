"""One thread of a child process is held still, and the others go on."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton_lab.chaos.engine_faults import THREAD
from baton_lab.chaos.held_thread import HeldThread, thread_of
from tests.support.clusters.processes.named_thread import child

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds single threads"),
]
WAIT_S = 60.0


async def held(process: subprocess.Popen[str]) -> HeldThread:
    made = HeldThread(thread_of(process.pid, THREAD))
    try:
        async with asyncio.timeout(WAIT_S):
            await made.until_held()
    except PermissionError as error:
        pytest.skip(f"this sandbox lets no process trace its children: {error}")
    return made


def state(process: subprocess.Popen[str]) -> str:
    """Of the engine's thread, in the kernel's letters: t is traced and stopped."""
    fields = Path(f"/proc/{process.pid}/task/{thread_of(process.pid, THREAD)}/stat").read_text()
    return fields.rpartition(")")[2].split()[0]


async def test_held_thread_stands_still_its_process_answers_and_it_goes_on_when_released() -> None:
    with child() as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        hold = await held(process)
        process.stdin.write("second\n")
        process.stdin.flush()
        process.send_signal(signal.SIGUSR1)
        assert process.stderr.readline() == "alive\n"
        assert state(process) == "t"
        hold.release()
        assert process.stdout.readline() == "second\n"
        hold.release()


async def test_process_that_is_killed_while_its_thread_is_held_ends() -> None:
    with child() as process:
        hold = await held(process)
        process.kill()
        assert await asyncio.to_thread(process.wait, WAIT_S) == -signal.SIGKILL
        hold.release()


async def test_thread_that_is_not_there_is_said() -> None:
    with child() as process:
        with pytest.raises(ProcessLookupError, match="has no thread prefill-engine"):
            thread_of(process.pid, "prefill-engine")
        thread_id = thread_of(process.pid, THREAD)
        process.kill()
        process.wait(WAIT_S)
        with pytest.raises(ProcessLookupError, match="cannot be listed"):
            thread_of(process.pid, THREAD)
        gone = HeldThread(thread_id)
        with pytest.raises(ProcessLookupError):
            await gone.until_held()
        gone.release()

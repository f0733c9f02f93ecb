"""vLLM in a separate process with its own environment. The process answers questions (peers/vllm_cpu_bench.py
--serve)."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.support.processor_time import until_quiet, with_descendants

_SCRIPT = Path(__file__).parents[1] / "peers" / "vllm_cpu_bench.py"


class VllmPeer:
    """Connection to one vLLM process, which is idle between questions. Must be used by one thread."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.version = str(self._answer()["ready"])

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        python: Path,
        model: Path,
        cores: Sequence[int],
        settings: Mapping[str, str],
        *,
        options: Sequence[str] = (),
    ) -> Iterator["VllmPeer"]:
        """Context manager. Start vLLM in a separate process, and yield it when it is ready, after about a minute. The
        process ends with the block. `settings` are environment variables of vLLM, and `options` are options of the
        script."""
        threads = ",".join(str(core) for core in cores)
        all_settings = {"VLLM_CPU_OMP_THREADS_BIND": threads, "OMP_NUM_THREADS": str(len(cores)), **settings}
        environment = ["env", *(f"{name}={value}" for name, value in all_settings.items())]
        command = [*environment, str(python), str(_SCRIPT), str(model), "--serve", *options]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield cls(process)
            assert process.stdin is not None
            process.stdin.close()  # this ends the process

    def ask(self, question: Mapping[str, object]) -> dict[str, object]:
        """Send a question to the vLLM process, and return its answer. vLLM is idle again when the answer arrives.
        Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        until_quiet(with_descendants([self._process.pid]))
        return answer

    def _answer(self) -> dict[str, object]:
        """Return the next line of the script. Lines that vLLM itself prints are skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the peer ended, with {self._process.wait()}: see its output above")

"""Checks in child processes that forms of structured outputs can be compiled. A form is a JSON schema, a regular
expression, a grammar or a list of texts. A form that crashes its child process is rejected, and does not affect other
requests.

The orchestrator has one FormProver for all requests. Workers compile forms that have passed the check
(`baton.text.grammars`). Results are cached, including rejections. Only one form of each tenant is compiled at a time,
so that no tenant can occupy all child processes. Used on one asyncio loop.
"""

import asyncio
import json
import logging
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import Pipe
from weakref import WeakValueDictionary

from baton.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from baton.limits import FORM_CPU_S, FORM_MEMORY_BYTES, FORM_STACK_BYTES, MAX_CHILDREN, MAX_PROOFS, MAX_PROVEN_BYTES
from baton.sampling_params import StructuredOutput

_RETRY_S = 1.0
_PATIENCE_S = 60.0
"""Time in seconds after which a child process that does not answer is killed. Normally the limit on processor time ends
the process earlier. That limit does not end a process that is suspended, for example by SIGSTOP."""
_MEANT = frozenset((signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP))
"""Signals that show that a form (JSON schema, regular expression, grammar or list of texts) crashed the child process
or exceeded its limits. If a child process ends by one of them, the form is rejected. Other signals have other
causes."""

_Outputs = tuple[tuple[int, ...], ...]
"""Output tokens of each choice of a resumed request."""

logger = logging.getLogger(__name__)


class _ChildEndedError(Exception):
    """Raised when a child process ends before it has answered."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a child that compiles forms ended with {status}")
        self.is_by_form = -status in _MEANT


class _Child:
    """Child process that compiles structured outputs, for example JSON schemas. Used by one thread at a time."""

    def __init__(self) -> None:
        """Start a child process. Call `ready` before `compile`."""
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "baton.text.form_child", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._is_ready = False

    def ready(self, load_json: Callable[[], str], eos_token_ids: Sequence[int], cpu_s: float) -> None:
        """Send the model's tokenizer and limits to the child process, unless this was done before. `load_json` returns
        the tokenizer in the format of tokenizer.json. `cpu_s` is the limit of processor time for each check, in
        seconds. A blocking call. Raises _ChildEndedError if the process ends."""
        if not self._is_ready:
            self._ask((load_json(), list(eos_token_ids), cpu_s))
            self._is_ready = True

    def compile(self, form: StructuredOutput, begun: _Outputs) -> int | str:
        """Compile a structured output, for example a JSON schema, in the child process. Return the size of the result
        in bytes, or the reason why `form` is rejected. `begun` holds the output tokens of each choice of a resumed
        request. A blocking call. Raises _ChildEndedError if the process ends."""
        fields = {name: value for name, value in asdict(form).items() if value and name != "compiled_bytes"}
        answer = json.loads(self._ask((fields, begun)))
        found: int | str = answer["error"] if "error" in answer else answer["bytes"]
        return found

    def end(self) -> None:
        """Kill the child process. A thread that waits for its answer gets _ChildEndedError. Thread-safe."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and release its resources. Idempotent."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, message: object) -> bytes:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
            if self._connection.poll(_PATIENCE_S):
                return self._connection.recv_bytes()
        except (EOFError, OSError):
            status = self._process.wait()
        else:
            status = -signal.SIGKILL
        self.close()
        raise _ChildEndedError(status)


class FormProver:
    """Checks that structured outputs, for example JSON schemas, can be compiled for one model. The owner must call
    `close`."""

    def __init__(self, load_json: Callable[[], str], eos_token_ids: Sequence[int], cpu_s: float = FORM_CPU_S) -> None:
        """Create a prover without child processes. `load_json` returns the model's tokenizer in the format of
        tokenizer.json. It is called in a thread, at the first check. `cpu_s` is the limit of processor time for each
        check, in seconds."""
        self._load_json, self._cpu_s = load_json, cpu_s
        self._eos_token_ids = tuple(eos_token_ids)
        self._threads = ThreadPoolExecutor(MAX_CHILDREN, "form-prover")
        self._children: list[_Child] = []
        """Child processes that are idle."""
        self._busy = set[_Child]()
        self._is_closed = False
        self._kept: OrderedDict[StructuredOutput, int | str] = OrderedDict()
        self._num_kept_bytes = 0
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by tenant. The lock of a tenant is held while a structured output of the tenant is compiled."""
        self._proofs = dict[object, asyncio.Task[int | str]]()
        """Running checks, by (structured output, output tokens of a resumed request). Requests for which both are equal
        share one check."""

    async def prove(
        self, form: StructuredOutput, outputs: Sequence[Sequence[int]] = (), owner: str = ""
    ) -> StructuredOutput:
        """Check that a structured output, for example a JSON schema, can be compiled. Return `form` with
        `compiled_bytes` set to its compiled size.

        For a resumed request, `outputs` holds the tokens that each choice already has, according to the client. `owner`
        is the tenant of the request. Raises InvalidArgumentError if `form` cannot be compiled within the limits, or if
        it does not allow `outputs`. Raises ResourceExhaustedError if too many checks are running.
        """
        begun = tuple(map(tuple, outputs)) if any(outputs) else ()
        answer = None if begun else self._kept.get(form)
        if answer is None:
            proof = self._proofs.get((form, begun)) or self._begin(form, begun, owner)
            answer = await asyncio.shield(proof)  # if a client cancels, others may still wait for the proof
        else:
            self._kept.move_to_end(form)
        if isinstance(answer, str):
            raise InvalidArgumentError(answer)
        return replace(form, compiled_bytes=answer)

    async def close(self) -> None:
        """Kill the child processes, which ends all running checks. Idempotent."""
        self._is_closed = True
        for child in list(self._busy):
            child.end()
        await asyncio.gather(*self._proofs.values(), return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)
        while self._children:
            self._children.pop().close()

    def _begin(self, form: StructuredOutput, begun: _Outputs, owner: str) -> asyncio.Task[int | str]:
        """Start a check and return its task. Raises ResourceExhaustedError when too many checks are running."""
        if len(self._proofs) >= MAX_PROOFS:
            raise ResourceExhaustedError(
                f"{len(self._proofs)} forms of structured output are being compiled: try again in {_RETRY_S:g} s",
                retry_after_s=_RETRY_S,
            )
        key = form, begun
        proof = self._proofs[key] = asyncio.create_task(self._prove(form, begun, owner))
        proof.add_done_callback(lambda _: self._proofs.pop(key))
        return proof

    async def _prove(self, form: StructuredOutput, begun: _Outputs, owner: str) -> int | str:
        turn = self._turns.setdefault(owner, asyncio.Lock())
        async with turn:
            loop = asyncio.get_running_loop()
            answer, is_final = await loop.run_in_executor(self._threads, self._compile, form, begun)
        if is_final and not begun:
            self._keep(form, answer)
        return answer

    def _compile(self, form: StructuredOutput, begun: _Outputs) -> tuple[int | str, bool]:
        """Compile `form` in a child process. Return the result of `_Child.compile`, and True if another check would
        have the same result. Called in a thread."""
        for _ in range(2):
            if self._is_closed:
                raise UnavailableError("this server no longer compiles forms: use another one")
            child = self._children.pop() if self._children else _Child()
            self._busy.add(child)
            try:
                child.ready(self._load_json, self._eos_token_ids, self._cpu_s)
                answer = child.compile(form, begun)
            except _ChildEndedError as error:
                logger.warning("a form of kind %s: %s", form.kind, error)
                if error.is_by_form:
                    return self._too_costly(form), True
                continue
            except BaseException:
                child.close()
                raise
            finally:
                self._busy.discard(child)
            self._children.append(child)
            return answer, True
        return self._too_costly(form), False

    def _too_costly(self, form: StructuredOutput) -> str:
        memory, stack = FORM_MEMORY_BYTES >> 20, FORM_STACK_BYTES >> 20
        return (
            f"sampling.structured_output.{form.kind} cannot be compiled within {self._cpu_s:g} s of a processor, "
            f"{memory} MiB of memory and {stack} MiB of stack: simplify it"
        )

    def _keep(self, form: StructuredOutput, answer: int | str) -> None:
        self._kept[form] = answer
        self._num_kept_bytes += _size(form)
        while self._num_kept_bytes > MAX_PROVEN_BYTES:
            self._num_kept_bytes -= _size(self._kept.popitem(last=False)[0])


def _size(form: StructuredOutput) -> int:
    """Return the size in bytes of a structured output in the cache: an estimate from the length of its texts."""
    texts = [form.json or "", form.regex or "", form.grammar or "", *form.choice]
    return 1024 + 4 * sum(map(len, texts))

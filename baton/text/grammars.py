"""Compiles the descriptions of structured outputs (forms) to grammars, and keeps grammars in a cache of limited size. A
form is, for example, a JSON schema or a regular expression in a request. A Matcher keeps the state of a grammar while
an output is generated.

The orchestrator has already checked in a child process that a request's form can be compiled
(`baton.text.form_prover`). The child process uses this module too. Workers compile the form again, and compute the
token masks of each choice (`Grammars.prepare`, `baton.text.token_masks`). Prefill ranks need the masks for the first
token, and generation engines for all tokens.

The compiler is the library llguidance, whose stack use grows with the depth of a form. Nothing is loaded before the
first request with a structured output.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from baton.errors import InvalidArgumentError
from baton.limits import FORM_STACK_BYTES, MAX_COMPILED_BYTES
from baton.sampling_params import StructuredOutput
from baton.text.compile_order import CompileOrder
from baton.text.json_schemas import schema_grammar
from baton.text.kept_core import load_core
from baton.text.token_masks import ChoiceMasks, Matcher

_LEAST_BYTES = 64 * 2**10
"""Minimum size in bytes that the cache counts for a grammar. A grammar that is smaller, or whose size was not measured,
is counted with this size."""
_STACKS = Lock()
"""Lock that is held while the stack size of new threads is changed. The stack size is a setting of the whole
process."""
_ANY_OBJECT = '{"type": "object"}'


def _limits() -> LLParserLimits:
    """Return limits with which computing a mask takes at most tens of milliseconds. The description of a structured
    output is refused if it exceeds them."""
    return LLParserLimits(
        max_items_in_row=10_000, initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False
    )


class Grammar:
    """Grammar compiled from a request's description of its structured output. Immutable and thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        """Size in bytes with which this grammar counts towards the limit of the cache."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = Lock()
        """Lock that is held while the matcher is copied, because only one thread may copy it at a time."""

    def matcher(self) -> Matcher:
        """Return a new Matcher at the beginning of an output."""
        with self._lock:
            return Matcher(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)


@dataclass(frozen=True, eq=False)
class _Preparation:
    """Arguments of a call of `Grammars.prepare`, and the future that the call returned."""

    form: StructuredOutput
    output_ids: tuple[int, ...]
    num_choices: int
    prepared: "Future[list[ChoiceMasks]]" = field(default_factory=Future)


class Grammars:
    """Grammars of one model. Thread-safe, except that `close` must be called on the thread that called `prepare`."""

    def __init__(
        self, load_json: Callable[[], str], eos_token_ids: Sequence[int], *, max_bytes: int = MAX_COMPILED_BYTES
    ) -> None:
        """Create an empty cache of at most `max_bytes` bytes of grammars. `load_json` returns the model's tokenizer in
        the format of tokenizer.json. It is called once, when the first grammar is compiled."""
        self._load_json = load_json
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._loading = Lock()
        """Lock that is held while the tokenizer is loaded, which takes half a second."""
        self._tokenizer: LLTokenizer | None = None
        self._lock = Lock()
        """Lock for the cached grammars and their total size, for `_waiting`, and for the two threads (`_compiling`,
        `_masking`). It is held only for microseconds, because engine threads wait for it."""
        self._compiled: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._waiting = CompileOrder[_Preparation]()
        """Calls of `prepare` that the thread `_compiling` has not begun to serve. It has at least one task for each of
        them."""
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None

    @classmethod
    def of_folder(cls, folder: Path, eos_token_ids: Sequence[int]) -> Self:
        """Create a Grammars object for a model. The tokenizer is loaded from `folder` when the first grammar is
        compiled."""

        return cls(lambda: load_core(folder).to_json(), eos_token_ids)

    def compile(self, form: StructuredOutput) -> Grammar:
        """Return the grammar of `form`, a request's description of its structured output. It is taken from the cache if
        possible. Blocks for milliseconds; the first call takes half a second.

        Raises InvalidArgumentError if `form` cannot be compiled. For a JSON schema, the error contains the location of
        the problem. Also raises InvalidArgumentError if structured outputs are not supported for the model.
        """
        with self._lock:
            grammar = self._compiled.get(form)
            if grammar is not None:
                self._compiled.move_to_end(form)
                return grammar
        tokenizer, num_bytes = self.load(), _num_bytes(form)
        ends = frozenset(self._eos_token_ids)
        grammar = Grammar(_compile(form, tokenizer), tokenizer.vocab_size, ends, num_bytes)
        with self._lock:
            if form not in self._compiled:
                self._compiled[form] = grammar
                self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._compiled.popitem(last=False)[1].num_bytes
        return grammar

    def prepare(
        self, form: StructuredOutput, output_ids: Sequence[int], num_choices: int = 1
    ) -> "Future[list[ChoiceMasks]]":
        """Start to compile `form`, a request's description of its structured output, and to compute the token masks of
        each choice. Return a future with one ChoiceMasks per choice. It is done when the mask of each choice's next
        token is computed. Does not block.

        `output_ids` are the output tokens that each choice already has. The future raises the errors of `compile`. It
        raises InvalidArgumentError if `form` does not allow `output_ids`. It is cancelled by `close` if the form still
        waits. The caller cancels it when the request ends, so that a form that still waits is not compiled. The forms
        that wait are compiled in the order of `baton.text.compile_order`.
        """
        asked = _Preparation(form, tuple(output_ids), num_choices)
        with self._lock:
            self._compiling = self._compiling or _deep_thread("grammar-compiler")
            self._masking = self._masking or _deep_thread("token-masks")
            self._waiting.add(asked, _LEAST_BYTES if form in self._compiled else _num_bytes(form))
            self._compiling.submit(self._prepare_next, self._masking)
        asked.prepared.add_done_callback(self._drop_cancelled)
        return asked.prepared

    def close(self) -> None:
        """End the threads that compile grammars and compute masks. Masks of choices must not be used after this call.
        Idempotent."""
        with self._lock:
            threads = [each for each in (self._compiling, self._masking) if each is not None]
            self._compiling = self._masking = None
        for each in threads:
            each.shutdown(cancel_futures=True)
        while self._waiting:
            self._waiting.take().prepared.cancel()

    def _prepare_next(self, thread: ThreadPoolExecutor) -> None:
        with self._lock:
            if not self._waiting:
                return  # some were cancelled
            asked = self._waiting.take()
        if not asked.prepared.set_running_or_notify_cancel():
            return  # cancelled just now
        try:
            masks = self._prepare(asked, thread)
        except BaseException as error:  # noqa: BLE001 - it is raised to the caller, who waits for the future
            asked.prepared.set_exception(error)
        else:
            asked.prepared.set_result(masks)
        finally:
            del asked  # an error's traceback refers to this frame

    def _drop_cancelled(self, prepared: "Future[list[ChoiceMasks]]") -> None:
        """Remove the calls whose futures are cancelled from those that wait, if `prepared` is cancelled."""
        if prepared.cancelled():
            with self._lock:
                self._waiting.drop(lambda asked: asked.prepared.cancelled())

    def _prepare(self, asked: _Preparation, thread: ThreadPoolExecutor) -> list[ChoiceMasks]:
        grammar = self.compile(asked.form)
        matchers = [grammar.matcher() for _ in range(asked.num_choices)]
        for matcher in matchers:
            matcher.consume(asked.output_ids)
        mask = matchers[0].mask()
        return [ChoiceMasks(matcher, len(asked.output_ids), mask, thread) for matcher in matchers]

    def load(self) -> LLTokenizer:
        """Return llguidance's tokenizer for the model. A blocking call; the first call takes half a second. Raises
        InvalidArgumentError if structured outputs are not supported for the model."""
        if not self._eos_token_ids:
            raise InvalidArgumentError(
                "sampling.structured_output: the model has no end-of-sequence token, by which an output would end; "
                "leave it out"
            )
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(self._load_json(), self._eos_token_ids)
            return self._tokenizer


def _num_bytes(form: StructuredOutput) -> int:
    return max(form.compiled_bytes, _LEAST_BYTES)


def _deep_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread. The thread has the stack size that the compiler needs for deeply nested
    descriptions of structured outputs."""
    executor = ThreadPoolExecutor(1, name)
    with _STACKS:
        before = threading.stack_size(FORM_STACK_BYTES)
        try:
            executor.submit(int)
        finally:
            threading.stack_size(before)
    return executor


def _tokenizer_of(text: str, eos_token_ids: Sequence[int]) -> LLTokenizer:
    try:
        return LLTokenizer(text, eos_token=list(eos_token_ids))
    except ValueError as error:
        raise InvalidArgumentError(
            f"sampling.structured_output: this model's tokenizer is not supported: {_one_line(str(error))}; leave it "
            "out"
        ) from error


def _compile(form: StructuredOutput, tokenizer: LLTokenizer) -> LLMatcher:
    matcher = LLMatcher(tokenizer, _source(form), log_level=0, limits=_limits())
    if error := matcher.get_error() or _trial_error(matcher.deep_copy(), tokenizer.eos_tokens):
        raise _refused(form, error)
    return matcher


def _trial_error(matcher: LLMatcher, eos_token_ids: Sequence[int]) -> str:
    """Return the reason why one of the first two masks of an output cannot be computed, for example because the
    structured output is too complex. Empty if both can be computed. The matcher cannot be used afterwards."""
    for _ in range(2):
        mask = bytearray(matcher.compute_logit_bias())
        if matcher.is_error():
            return matcher.get_error()
        if not any(mask):
            return "no token can begin the output"
        for token_id in eos_token_ids:
            mask[token_id] = 0
        first = len(mask) - len(mask.lstrip(b"\0"))
        matcher.consume_token(first if first < len(mask) else eos_token_ids[0])
    return matcher.get_error()


def _source(form: StructuredOutput) -> str:
    """Return the description of a structured output in the format that llguidance reads."""
    if form.json is not None or form.json_object:
        return schema_grammar(_ANY_OBJECT if form.json is None else form.json)
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    try:
        if form.grammar is not None:
            return grammar_from("grammar", form.grammar)
        return grammar_from("choice", json.dumps(form.choice, ensure_ascii=False))
    except ValueError as error:
        raise _refused(form, str(error)) from error


def _refused(form: StructuredOutput, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"sampling.structured_output.{form.kind} cannot be compiled: {_one_line(reason)}; correct or simplify it"
    )


def _one_line(text: str) -> str:
    return " ".join(text.removesuffix("<non-verbose/>").split())[:300]

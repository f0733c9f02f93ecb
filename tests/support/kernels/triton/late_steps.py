"""Engines whose device is late: a launched step runs only when the host waits for its tokens. Later work of the host
therefore happens before the step, as on a GPU that is slower than the host. Free pages of KV are poisoned with NaN.
"""

import contextlib
import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from baton.errors import ResourceExhaustedError
from baton.modeling.device.port import Device
from baton.modeling.kv.pages import PAGE_TOKENS
from baton.sampling_params import SamplingParams, StructuredOutput
from baton.types import FinishReason, SampledToken, SlotId
from generate_workers.engine.model_runner import LaunchedStep
from generate_workers.engine.rows import Row, StreamId
from generate_workers.engine.scheduling_policy import StepPlan
from generate_workers.residency.paged import PagedResidency
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.devices import TensorDevice
from tests.support.engines.generation import Collector, Harness, eos_decoder, harness, prompt, reference_ids
from tests.support.engines.slot_tables import is_empty
from tests.support.kernels.triton.step_engines import DRAWN, FILTERED, GREEDY, engine_on

MAX_TOKENS = 192


class LateQueue:
    """Queue of a device: work that was launched, and runs when the host waits for it."""

    def __init__(self) -> None:
        self.most = 0
        """Largest number of pieces of work that were in the queue at the same time."""
        self._work = deque[Callable[[], None]]()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue work, and return a function that runs all work up to it."""
        self._work.append(work)
        self.most = max(self.most, len(self._work))

        def wait() -> None:
            while work in self._work:
                self._work.popleft()()

        return wait

    def run_before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs all work, and then `function`, whose work is not queued."""

        def call(*args: Any) -> Any:
            while self._work:
                self._work.popleft()()
            return function(*args)

        return call


@contextmanager
def late_engine(
    device: Device | None = None, *, late: bool = True, queue: LateQueue | None = None, **options: Any
) -> Iterator[Harness]:
    """Run an engine on a late device, or, if `late` is False, on a CPU device that runs a step when it is launched. At
    the end, check that steps without drafts were launched before the step before was read, and that all pages are free.
    `queue`: queue of the late device."""
    num_ahead = 0
    with engine_on(device or TensorDevice(), max_slot_tokens=MAX_TOKENS, **options) as (made, _):
        runner = made.engine._pipeline._runner
        steps, launch = runner._device_steps, runner.launch
        assert steps is not None
        if late and not steps.captures:  # a GPU is late by itself
            queue = queue or LateQueue()
            vars(steps).update(_queue=queue, logits=queue.run_before(steps.logits))

        def launched(plan: StepPlan, rows: Mapping[SlotId, Row], behind: LaunchedStep | None) -> LaunchedStep | None:
            nonlocal num_ahead
            step = launch(plan, rows, behind)
            num_ahead += step is not None and behind is not None
            return step

        vars(runner)["launch"] = launched
        yield made
        made.engine.step()
        assert is_empty(made.slots.ledger())
        residency = made.slots.memory.residency
        assert isinstance(residency, PagedResidency) and residency.pool.num_free == residency.pool.num_pages
        has_drafts = options.get("speculation", "off") != "off"  # steps with drafts wait for the step before
        assert num_ahead or has_drafts, "no step was launched before the step before was read"


def check_ends(device: Device | None = None) -> None:
    """Check that a sequence that ends by a token runs in one further step, that its slot is used by others only after
    that step, and that no event follows its last one."""
    cpu, ids = eos_decoder(), prompt(9)
    expected = reference_ids(cpu, ids, dataclasses.replace(DRAWN, max_tokens=12))
    ending = dataclasses.replace(DRAWN, max_tokens=12, stop_token_ids=(expected[5],))
    assert expected[5] not in expected[:5]
    with late_engine(device, num_slots=2) as made:
        _, stream = made.submit(ids, ending)
        _, other = made.submit(prompt(12), dataclasses.replace(GREEDY, max_tokens=12))
        while not stream.ended.is_set():
            made.engine.step()
        _, third = made.submit(prompt(30), FILTERED)
        assert made.slots.ledger().num_free == 0, "a launched step still uses the slot"
        made.engine.step()
        made.run()
        assert stream.token_ids == expected[:6] and stream.finish is FinishReason.STOP
        assert other.token_ids == reference_ids(cpu, prompt(12), dataclasses.replace(GREEDY, max_tokens=12))
        assert third.token_ids == reference_ids(cpu, prompt(30), FILTERED)


def check_walk(
    device: Device | None = None, *, seed: int = 0, num_requests: int = 24, speculation: str = "off"
) -> None:
    """Check that requests which come, stop, are cancelled, pushed and preempted get the tokens of an engine that reads
    each step before it launches the next."""
    cpu = eos_decoder()
    limits = MemoryLimits(1 << 40, 7 * PAGE_TOKENS * cpu.layout.token_bytes)
    options: dict[str, Any] = {"limits": limits, "growth_tokens": 8, "max_batched_tokens": 64, "num_slots": 5}
    with late_engine(device, speculation=speculation, **options) as made:
        cancels = 0.08 if speculation == "off" else 0.2  # drafts leave fewer steps
        walk = _Walk(made, random.Random(seed), num_requests, cancels)
        walk.run()
        for ids, params, stream in walk.asked:
            for number in range(params.n):
                got, mine = stream.choice(number), params.of_choice(number)
                expected = _stopped(reference_ids(cpu, ids, dataclasses.replace(mine, stop_token_ids=())), params)
                ended = got.finish is not FinishReason.CANCELLED
                assert got.token_ids == (expected if ended else expected[: len(got.token_ids)]), (ids, params)
        assert walk.num_cancelled and walk.num_pushed


def check_preemption(device: Device | None = None) -> None:
    """Check that the unread step is read before a sequence is preempted."""
    cpu = eos_decoder()
    limits = MemoryLimits(1 << 40, 3 * PAGE_TOKENS * cpu.layout.token_bytes)
    asked = [(prompt(63), DRAWN), (prompt(62), GREEDY), (prompt(5), FILTERED)]
    with late_engine(device, limits=limits, growth_tokens=1, max_batched_tokens=64) as made:
        streams = [made.submit(*each)[1] for each in asked]
        made.run()
        assert made.engine.status().num_preemptions >= 1
        for each, stream in zip(asked, streams, strict=True):
            assert stream.token_ids == reference_ids(cpu, *each)


def check_failures(device: Device | None = None, *, late: bool = True) -> None:
    """Check that an error of the drawing ends the streams of its step, and no others."""
    cpu, penalised = eos_decoder(), dataclasses.replace(GREEDY, max_tokens=30, presence_penalty=0.5)

    def fail(_: Tensor) -> None:
        raise ValueError("broken")

    with late_engine(device, late=late, num_slots=3) as made:
        _, stream = made.submit(prompt(9), penalised)
        for _ in range(5):
            made.engine.step()
        [row] = made.engine._running.rows.values()
        vars(row.sampler)["adjust"] = fail
        made.run(stream)
        assert stream.finish is FinishReason.ERROR and stream.error == "ValueError: broken"
        _, other = made.submit(prompt(5), GREEDY)
        made.run(other)
        assert other.token_ids == reference_ids(cpu, prompt(5), GREEDY)


def check_grammars(device: Device | None = None) -> None:
    """Check that sequences with grammars, penalties, biases and a minimum length are pipelined, and get the tokens of
    the CPU. Their logits are changed after the step before was read."""
    pattern, choice = StructuredOutput(regex="[a-z]{3,9}[0-9]{2}"), StructuredOutput(choice=("no", "a long answer"))
    greedy, drawn = (dataclasses.replace(params, max_tokens=16) for params in (GREEDY, DRAWN))
    asked = [
        (prompt(9), dataclasses.replace(drawn, structured_output=pattern, ignore_eos=False)),
        (prompt(5), dataclasses.replace(greedy, structured_output=choice, ignore_eos=False)),
        (prompt(7), dataclasses.replace(drawn, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5)),
        (prompt(11), dataclasses.replace(greedy, logit_bias={3: 4.0, 5: -100.0})),
        (prompt(12), dataclasses.replace(drawn, min_tokens=12, ignore_eos=False, stop_token_ids=tuple(range(40)))),
        (prompt(4), greedy),
        (prompt(6), dataclasses.replace(drawn, logprobs=2, max_tokens=3)),
    ]
    for mine, theirs in _late_and_cpu(device, asked):
        assert (mine.token_ids, mine.finish, mine.text) == (theirs.token_ids, theirs.finish, theirs.text)


def check_logprobs(device: Device | None = None) -> None:
    """Check that sequences that report logprobs are pipelined, and get the tokens and logprobs of the CPU."""
    drawn = dataclasses.replace(FILTERED, max_tokens=8, logprobs=20)
    asked = [
        (prompt(9), drawn),
        (prompt(5), dataclasses.replace(GREEDY, max_tokens=9, logprobs=0)),
        (prompt(8), dataclasses.replace(GREEDY, max_tokens=9)),
        (prompt(7), dataclasses.replace(drawn, repetition_penalty=1.3, logprobs=3)),
        (prompt(6), dataclasses.replace(drawn, structured_output=StructuredOutput(choice=("no",)), ignore_eos=False)),
        (prompt(12), dataclasses.replace(GREEDY, max_tokens=4, logprobs=2, prompt_logprobs=1)),
    ]
    for mine, theirs in _late_and_cpu(device, asked):
        assert mine.token_ids == theirs.token_ids
        _check_logprobs(mine.tokens, theirs.tokens)


def check_drafts(device: Device | None = None) -> None:
    """Check that the draft steps of a round and the step that verifies them are launched before any of them is read,
    that drafts with all keys are accepted, and that sequences get the CPU's tokens."""
    cpu, queue = eos_decoder(), LateQueue()
    sizes: dict[str, Any] = {"num_slots": 4, "max_batched_tokens": 48, "speculation": "streaming", "draft_tokens": 3}
    params = [dataclasses.replace(each, max_tokens=9) for each in (GREEDY, DRAWN, FILTERED)]
    with late_engine(device, queue=queue, draft_keys=MAX_TOKENS, **sizes) as made:
        streams = [made.submit(prompt(60 + 5 * size, size), each)[1] for size, each in enumerate(params)]
        made.run()
        stats = made.engine.status().speculation
        assert stats is not None and stats.num_drafted == stats.num_accepted > 0, "drafts have all keys"
    for size, (each, stream) in enumerate(zip(params, streams, strict=True)):
        assert stream.token_ids == reference_ids(cpu, prompt(60 + 5 * size, size), each)
    if queue.most:
        assert queue.most == 4, "three draft steps and the step that verifies them"


def check_drafts_of_others(device: Device | None = None) -> None:
    """Check that sequences whose drafts have few keys get the CPU's tokens. The host draws the tokens of some of them,
    or their logprobs, or scores the prompt of another sequence while they verify drafts."""
    cpu = eos_decoder()
    sizes: dict[str, Any] = {"num_slots": 4, "max_batched_tokens": 48, "speculation": "streaming", "draft_tokens": 3}
    others = [
        dataclasses.replace(DRAWN, max_tokens=5, presence_penalty=0.5),
        dataclasses.replace(GREEDY, max_tokens=5, logprobs=1),
        dataclasses.replace(GREEDY, max_tokens=3, prompt_logprobs=1),
        dataclasses.replace(DRAWN, max_tokens=9),
    ]
    with late_engine(device, draft_keys=16, **sizes) as made:
        streams = []
        for size, each in enumerate(others):
            streams.append(made.submit(prompt(150 + size, size), each)[1])
            for _ in range(3):
                made.engine.step()
        made.run()
        stats = made.engine.status().speculation
        assert stats is not None and stats.num_drafted > stats.num_accepted, "drafts have few keys"
    for size, (each, stream) in enumerate(zip(others, streams, strict=True)):
        assert stream.token_ids == reference_ids(cpu, prompt(150 + size, size), each), each


def _late_and_cpu(
    device: Device | None, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]
) -> list[tuple[Collector, Collector]]:
    """Return the streams of requests on a late device, each with that of an engine on the CPU."""
    engines = late_engine(device, num_slots=len(asked)), harness(decoder=eos_decoder(), num_slots=len(asked))
    answers = []
    for engine in engines:
        with engine as made:
            answers.append([made.submit(*each)[1] for each in asked])
            made.run()
    return list(zip(*answers, strict=True))


def _check_logprobs(found: Sequence[SampledToken], expected: Sequence[SampledToken]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [each.logprob for each in mine.top] == pytest.approx([each.logprob for each in theirs.top], abs=1e-4)
        gaps = [abs(each.logprob - after.logprob) for each, after in itertools.pairwise(theirs.top)]
        if min(gaps, default=1.0) > 1e-4:  # the order is not that of rounding errors
            assert [each.token_id for each in mine.top] == [each.token_id for each in theirs.top]


def _stopped(token_ids: list[int], params: SamplingParams) -> list[int]:
    ends = [index for index, token_id in enumerate(token_ids) if token_id in params.stop_token_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids


@dataclasses.dataclass
class _Walk:
    made: Harness
    rng: random.Random
    num_left: int
    cancels: float
    """Probability of a cancellation after each step."""
    asked: list[tuple[tuple[int, ...], SamplingParams, Collector]] = dataclasses.field(default_factory=list)
    open: list[tuple[StreamId, Collector]] = dataclasses.field(default_factory=list)
    num_cancelled: int = 0
    num_pushed: int = 0

    def run(self) -> None:
        """Step the engine until all requests have ended."""
        while self.num_left or self.open:
            if self.num_left and len(self.open) < 6 and self.rng.random() < 0.4:
                self._ask()
            self.made.engine.step()
            self.open = [each for each in self.open if not each[1].ended.is_set()]
            if self.open and self.rng.random() < self.cancels:
                self.num_cancelled += 1
                self.made.engine.cancel(self.rng.choice(self.open)[0])

    def _ask(self) -> None:
        rng, self.num_left = self.rng, self.num_left - 1
        penalised = dataclasses.replace(DRAWN, presence_penalty=0.5)
        base = rng.choice((GREEDY, DRAWN, FILTERED, penalised, dataclasses.replace(GREEDY, logprobs=1)))
        params = dataclasses.replace(
            base,
            max_tokens=rng.randint(1, 20),
            seed=rng.randrange(1000),
            stop_token_ids=tuple(rng.sample(range(95), 4)) if rng.random() < 0.6 else (),
            n=rng.choice((1, 1, 1, 2)),
        )
        ids = prompt(rng.randint(1, 80), rng.randrange(5))
        ref = None
        if rng.random() < 0.4:
            with contextlib.suppress(ResourceExhaustedError):
                ref = self.made.reserve(len(ids), len(ids) + params.max_tokens, num_choices=params.n).ref
                self.made.push_and_commit(ref, ids, params)
                self.num_pushed += 1
        stream_id, stream = self.made.submit(ids, params, ref=ref)
        self.asked.append((ids, params, stream))
        self.open.append((stream_id, stream))

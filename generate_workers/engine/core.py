"""Generation engine: continuous batching on its own thread.

`servicer` submits streams to the `request_queue`, from any thread. A stream joins the batch between two steps: when its
lease is committed or, without a lease, when a slot is free. Each step runs one forward over all sequences
(`model_runner`), samples their next tokens together, and emits events. A sequence's slot is freed before the sequence's
last event is sent, unless the stream's RowEndHook takes over the slot. When memory is short, the youngest sequences are
preempted (`preemption`).

A stream has one slot, one sequence (class Row) and one last event for each choice. The prompt is prefilled, or its KV
is received, only once, for the first choice. When this KV is complete, the other choices get a copy. All choices sample
their first tokens from the same logits.

`step` and all functions that it calls run only on the thread 'generate-engine'. RequestQueue holds the state that other
threads share.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from baton.errors import InvalidArgumentError, LeaseError, NotFiniteError, ResourceExhaustedError
from baton.modeling.device.faults import device_failure
from baton.modeling.forward.drawing import NO_TOKEN
from baton.modeling.forward.step_graphs import StepGraphs
from baton.process.thread_names import show_thread_name
from baton.process.turn_watch import TurnWatch
from baton.text.grammars import Grammars
from baton.text.token_masks import ChoiceMasks
from baton.types import DraftRound, FinishReason, SampledToken, TokenEvent
from generate_workers.config import EngineConfig
from generate_workers.engine.model_runner import ModelRunner
from generate_workers.engine.pipeline import Next, StepPipeline
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.request_queue import RequestQueue
from generate_workers.engine.rows import EngineStream, EventSink, GenerationRequest, Row, RowEndHook, StreamId
from generate_workers.engine.scheduling_policy import StepPlan
from generate_workers.engine.served_model import ServedModel
from generate_workers.engine.status import EngineStatus
from generate_workers.residency.port import Residency, RowError
from generate_workers.slots.leases import BatchSlot

logger = logging.getLogger(__name__)


class GenerationEngine:
    """Generation engine that owns the batch. `start` must be called once, and `close` at the end. Any thread may call
    `submit` and `cancel`."""

    def __init__(
        self,
        model: ServedModel,
        running: RunningRows,
        config: EngineConfig,
        *,
        device_steps: StepGraphs | None = None,
        crash_note: str = "",
    ) -> None:
        """Make an engine, which owns `running` from now on. `running` must have no sequences yet. `device_steps` runs
        the steps that it supports entirely on the device; None: all steps run through the decoder. `crash_note` is the
        path of a file into which the engine writes the requests of the running steps, so that they are known after a
        crash; empty: no such file."""
        slots, decoder, tokenizer = running.slots, model.decoder, model.tokenizer
        self.residency: Residency = slots.memory.residency
        """Residency policy that stores the KV of all sequences. Any thread may read its traits."""
        self._speculation = running.speculation
        self._decoder, self._tokenizer = decoder, tokenizer
        self._slots = slots
        self._clock = slots.clock
        self._max_tokens = min(slots.max_slot_tokens, decoder.config.max_position)
        self._grammars = Grammars(tokenizer.to_json, decoder.config.eos_token_ids)
        self._queue = RequestQueue(config.max_waiting, slots)

        # Used only by the engine's thread:
        self._running = running
        runner = ModelRunner(decoder, self.residency, device_steps)
        is_maximal = config.acceptance == "maximal"
        self._pipeline = StepPipeline(runner, running, self._accept, crash_note=crash_note, is_maximal=is_maximal)
        self._cost = model.step_cost
        if runner.replays:
            self._cost.replay_graphs()
        self._waiting: deque[EngineStream] = deque()
        self._leased: dict[StreamId, EngineStream] = {}
        self._num_not_finite = 0

        self._thread = threading.Thread(target=self._run, name="generate-engine", daemon=True)
        self._watch = TurnWatch.over(self._thread, self._clock, config.watchdog_floor_s)

    def start(self) -> None:
        """Start the engine's thread. Call once."""
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """Operating system's id of the engine's thread. Valid only after `start`."""
        assert self._thread.native_id is not None
        return self._thread.native_id

    def close(self) -> None:
        """End all open streams with an error, and stop the engine's thread. Blocks until the running step ends.
        Idempotent."""
        self._queue.close("the generation engine is shutting down: try another group")
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._end_all()
        self._grammars.close()
        self._slots.rest()
        self.residency.close()
        self._decoder.device.link.rest()

    def submit(self, request: GenerationRequest, on_event: EventSink, hook: RowEndHook | None = None) -> StreamId:
        """Open a stream for a request and return its id. The engine's thread calls `on_event` for each event, and
        `hook` when sequences of the stream end. The last event of each choice has a finish reason. Any thread may call
        this method. It does not block.

        Raises InvalidArgumentError for a field that is out of its limits, StaleStampError or LeaseExpiredError if the
        lease has ended, ResourceExhaustedError if too many requests wait for a slot, and UnavailableError if the engine
        is closed. After an error no stream is open, and the caller still owns the lease.
        """
        request.check(self._decoder.config.vocab_size, self._max_tokens, self._slots.num_slots)
        self._slots.memory.check(request.num_tokens, request.capacity_tokens, request.params.n)
        if request.lease_ref is not None:
            leased = self._slots.leased_tokens(request.lease_ref)
            if leased != (known := request.num_tokens):
                raise InvalidArgumentError(f"lease is for {leased} tokens: prompt_ids and output_ids hold {known}")
        return self._queue.open(request, on_event, hook, self._preparation(request)).stream_id

    def _preparation(self, request: GenerationRequest) -> Callable[[], Future[list[ChoiceMasks]]] | None:
        """Return a function that starts to prepare the token masks of a constrained request's choices; None for an
        unconstrained request."""
        form = request.params.structured_output
        if form is None:
            return None
        return partial(self._grammars.prepare, form, request.output_ids, request.params.n)

    def cancel(self, stream_id: StreamId) -> None:
        """End a stream before the next step, and free its lease or its slots. Idempotent. Any thread may call it."""
        self._queue.cancel(stream_id)

    def status(self) -> EngineStatus:
        """Return the engine's current state. Each call also checks that the engine does not hang. Any thread may call
        it. Raises UnavailableError if the engine has failed or is closed."""
        self._queue.check_open()
        self._watch.look(self._has_rows or self._queue.has_messages)
        running = self._running
        return EngineStatus(
            ledger=self._slots.ledger(),
            num_streams=len(self._queue.streams()),
            num_rows=len(running.rows),
            num_steps=self._pipeline.num_steps,
            num_preemptions=running.num_preemptions,
            num_preempted=len(running.waiting),
            last_step=self._pipeline.last_step,
            step_costs=self._cost.learnt,
            speculation=None if self._speculation is None else self._speculation.stats,
            device=self._decoder.device.name,
            stall=self._watch.stall,
            num_not_finite=self._num_not_finite,
        )

    def step(self) -> None:
        """Run one step. First process messages of other threads, end expired leases, and add waiting sequences to the
        batch. Then plan and run the step, and accept the next tokens of the sequences."""
        try:
            self._watched_step()
        finally:
            self._watch.end()

    def _watched_step(self) -> None:
        started_s, name = self._clock.now_s(), f"step {self._pipeline.num_steps + 1}"
        self._watch.begin(name, 0.0)
        self._take_messages()
        self._slots.expire()
        self._join_committed()
        self._join_waiting()
        if (behind := self._pipeline.behind) is not None:
            with self._ending_failed(behind):
                self._pipeline.draw()
        plan = self._running.plan(ahead=behind is not None)
        self._watch.begin(name, plan.expected_s)
        with self._ending_failed(plan):
            if not self._pipeline.launch(plan) and behind is None and plan:
                self._pipeline.run(plan, started_s)
        if behind is not None:
            self._read_tokens(behind)

    def _read_tokens(self, plan: StepPlan) -> None:
        """Accept the tokens of the unread step, which was launched with `plan`."""
        with self._ending_failed(plan):
            self._pipeline.read()

    def _run(self) -> None:
        show_thread_name()
        try:
            while self._await_work():
                self.step()
        except Exception as error:
            if failure := device_failure(error):
                logger.error("the device of the generation engine failed: %s", failure)
            else:
                logger.exception("the generation engine failed")
            self._queue.close(f"the generation engine failed: {failure or _one_line(error)}: restart the worker")
        finally:
            self._queue.close("the thread of the generation engine has ended: restart the worker")
            self._end_all()

    @property
    def _has_rows(self) -> bool:
        """Return whether a step is unread, or the batch has sequences and does not wait for memory. Any thread."""
        return self._pipeline.has_unread or (bool(self._running.rows) and not self._running.is_stalled)

    def _await_work(self) -> bool:
        """Wait until the engine has work. Return False when it is closed."""
        if self._has_rows:
            return not self._queue.close_reason
        return self._queue.await_work()

    def _take_messages(self) -> None:
        came, cancelled = self._queue.take()
        for stream in came:
            if stream.request.lease_ref is None:
                self._waiting.append(stream)
            else:
                self._leased[stream.stream_id] = stream
        failed = {stream: failure for stream in came if (failure := stream.failure) is not None}
        for stream, failure in failed.items():
            self._end(stream, FinishReason.ERROR, _one_line(failure))
        for stream in cancelled:
            if stream not in failed:
                self._end(stream, FinishReason.CANCELLED)

    def _join_committed(self) -> None:
        """Add streams whose lease is committed to the batch. End those whose lease has ended."""
        for stream in list(self._leased.values()):
            ref = stream.request.lease_ref
            assert ref is not None
            try:
                batch_slots = self._slots.activate(ref)
            except LeaseError as error:
                del self._leased[stream.stream_id]  # this stream must not end the sequence that the slot has now
                self._end(stream, FinishReason.ERROR, _one_line(error))
                continue
            if batch_slots is None:
                continue
            del self._leased[stream.stream_id]
            leader = self._join(stream, batch_slots)
            if leader is not None and leader.first is not None:
                self._begin_pushed(leader)

    def _begin_pushed(self, leader: Row) -> None:
        """Start a stream's sequences from pushed KV and the first tokens that arrived with it."""
        rows = [leader, *leader.followers]
        behind = self._pipeline.behind
        if leader.followers and behind is not None:  # its sequences must not end before shared pages are copied
            self._read_tokens(behind)
        try:
            self._running.fork(leader)
        except Exception as error:
            logger.exception("request %s: its choices cannot share their prompt", leader.stream.request.request_id)
            self._end(leader.stream, FinishReason.ERROR, _one_line(error))
            return
        for row in rows:
            assert row.first is not None
            self._accept(row, row.first)

    def _join_waiting(self) -> None:
        """Assign free slots to streams without a lease, first come, first served, if no preempted sequence waits."""
        has_turn = self._resume()
        while has_turn and self._waiting:
            stream = self._waiting[0]
            request = stream.request
            occupy = partial(self._slots.occupy, request.num_tokens, request.capacity_tokens, request.params.n)
            try:
                batch_slots = self._queue.claim_slots(stream, occupy)
            except ResourceExhaustedError as error:
                self._end(stream, FinishReason.ERROR, _one_line(error))
                continue
            if batch_slots is None:
                return
            self._waiting.popleft()
            self._join(stream, batch_slots)

    def _resume(self) -> bool:
        """Resume preempted sequences. Return True if none waits any more. End streams that cannot get memory alone."""
        while True:
            try:
                return self._running.resume()
            except ResourceExhaustedError as error:
                self._end(self._running.waiting[0].stream, FinishReason.ERROR, _one_line(error))

    def _join(self, stream: EngineStream, batch_slots: list[BatchSlot]) -> Row | None:
        """Make a Row for each choice of a stream, and add the first Row to the batch. The other Rows join when they
        have a copy of its KV. Return the first Row. If the Rows cannot be made, end the stream and return None."""
        config = self._decoder.config
        try:
            rows = [
                Row(stream, choice, batch_slot, self._tokenizer, config)
                for choice, batch_slot in enumerate(batch_slots)
            ]
        except Exception as error:
            logger.exception("request %s cannot join", stream.request.request_id)
            for batch_slot in batch_slots:
                self._slots.release(batch_slot.ref)
            self._end(stream, FinishReason.ERROR, _one_line(error))
            return None
        stream.rows, stream.has_rows = list(rows), True
        self._running.add(rows)
        return rows[0]

    @contextmanager
    def _ending_failed(self, plan: StepPlan) -> Iterator[None]:
        """If the block raises an error, log it, and end the streams of its sequence, or of all sequences of the plan,
        with this error. Raises the error if the device has failed: the engine then ends."""
        running = self._running
        try:
            yield
        except Exception as error:
            if device_failure(error):
                raise
            logger.exception("a step of %d rows failed", len(plan.spans))
            self._num_not_finite += isinstance(error.__cause__, NotFiniteError)
            failed = [error.slot] if isinstance(error, RowError) else [span.slot for span in plan.spans]
            for stream in {running.rows[slot].stream: None for slot in failed if slot in running.rows}:
                self._end(stream, FinishReason.ERROR, _one_line(error))

    def _accept(self, row: Row, token: Next, drafts: DraftRound | None = None, goes_on: bool = False) -> None:
        """Accept a sequence's next token and emit its event. For the last token, the slot is freed or handed over
        first. If `token` is an error, end the stream with it."""
        stream = row.stream
        if row not in stream.rows:  # the stream has ended because another of its choices failed
            return
        if isinstance(token, SampledToken) and token.token_id == NO_TOKEN:
            self._num_not_finite += 1
            num_tokens = len(row.token_ids)
            token = NotFiniteError(f"the logits behind {num_tokens} tokens are not finite: is the model damaged?")
        if isinstance(token, Exception):
            self._end(stream, FinishReason.ERROR, _one_line(token))
            return
        try:
            event = row.accept(token, self._clock.unix_ns(), drafts, goes_on=goes_on)
        except Exception as error:
            logger.exception("request %s failed", stream.request.request_id)
            self._end(stream, FinishReason.ERROR, _one_line(error))
            return
        if event.finish is not None:
            stream.rows.remove(row)
            self._running.retire(row)
            if stream.is_over:
                self._queue.forget(stream)
        self._emit(stream, event)
        if stream.is_over:
            stream.tell_ended()

    def _end(self, stream: EngineStream, finish: FinishReason, error: str = "") -> None:
        """End a stream in any stage, and emit a terminal event without a token for each of its open choices."""
        choices = stream.open_choices()
        try:
            self._leave(stream)
        finally:
            for choice, num_output in choices:
                self._emit(stream, TokenEvent(num_output, None, "", self._clock.unix_ns(), finish, error, choice))
            stream.tell_ended()

    def _leave(self, stream: EngineStream) -> None:
        """Remove a stream from the batch and all queues, and free its slots and its lease."""
        for row in list(stream.rows):
            stream.rows.remove(row)
            self._running.remove(row)
        if self._leased.pop(stream.stream_id, None) is not None:
            assert stream.request.lease_ref is not None
            self._slots.abort(stream.request.lease_ref)
        if stream in self._waiting:
            self._waiting.remove(stream)
        self._queue.forget(stream)

    def _emit(self, stream: EngineStream, event: TokenEvent) -> None:
        try:
            stream.on_event(event)
        except Exception:
            logger.exception("request %s: its events cannot be delivered", stream.request.request_id)
            self.cancel(stream.stream_id)

    def _end_all(self) -> None:
        """End every open stream. The engine is closed, so no stream can be added meanwhile."""
        self._take_messages()
        self._pipeline.abandon()
        for stream in self._queue.streams():
            try:
                self._end(stream, FinishReason.ERROR, self._queue.close_reason)
            except Exception:  # a step that failed half-way may have left this stream inconsistent: end the others
                logger.exception("request %s cannot be ended", stream.request.request_id)


def _one_line(error: BaseException) -> str:
    text = (str(error).strip() or "no details").splitlines()[0]
    return f"{type(error).__name__}: {text}"

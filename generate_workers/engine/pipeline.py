"""Runs the steps of an engine, pipelined where possible: a step is launched on the device before the host has read the
tokens of the step before it, so that the host's work on these tokens and the next step run at the same time
(asynchronous scheduling).

A step can be launched in this way if its forward pass runs entirely on the device
(`baton.modeling.forward.step_graphs`), and it has no drafts. All other steps run after all earlier ones were read. If
the host must change logits before tokens are drawn from them, because of penalties, biases or grammars, it launches the
drawing when it has read the step before. Meanwhile, the device computes the forward pass.

When a token ends its sequence, the next step may already run with this sequence. This costs one token, which is
discarded. The slot of such a sequence, and its memory, are used by others only after that step has been read, because
each launched step counts as a user of its slots.

Owned by the engine's thread.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.modeling.forward.step_graphs import PendingTokens
from baton.process.crash_notes import ComputedNow
from baton.types import DraftRound, SampledToken
from generate_workers.engine.model_runner import LaunchedStep, ModelRunner
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import StepPlan
from generate_workers.engine.status import StepStats
from generate_workers.slots.leases import SlotClaim

Next = SampledToken | Exception
"""Next token of a sequence, or the reason why it could not be sampled."""
Accept = Callable[[Row, Next, DraftRound | None, bool], None]
"""Function that accepts the next token of a sequence. Its last arguments are the result of the sequence's drafts, and
True if the step has further tokens for the sequence."""


@dataclass(frozen=True)
class _Unread:
    step: LaunchedStep
    claims: list[SlotClaim]
    """Claims of the slots that the step uses."""
    watched: tuple[bytes, ...]
    """Fingerprints of requests that the crash note must contain while the step runs."""
    launched_s: float


class StepPipeline:
    """Runs steps, and passes the sampled tokens to `accept`. Between two calls, at most one launched step is unread."""

    def __init__(
        self, runner: ModelRunner, running: RunningRows, accept: Accept, *, crash_note: str = "", is_maximal: bool
    ) -> None:
        """`crash_note`: path of the file that contains the requests of the running steps; empty: no such file.
        `is_maximal`: drafts are accepted by the maximal rule, and not by the coupled rule (`verified`)."""
        self.num_steps = 0
        """Number of steps that have begun so far."""
        self.last_step: StepStats | None = None
        """Statistics of the latest step whose tokens were accepted."""
        self._runner = runner
        self._running = running
        self._accept = accept
        self._is_maximal = is_maximal
        self._slots, self._clock = running.slots, running.slots.clock
        self._computed = ComputedNow(crash_note)
        self._unread = deque[_Unread]()
        self._read_s = 0.0
        """Time at which the latest launched step was read."""

    @property
    def behind(self) -> StepPlan | None:
        """Plan of the launched step that is unread; None if all steps were read."""
        return self._unread[0].step.plan if self._unread else None

    @property
    def has_unread(self) -> bool:
        """True if a launched step is unread. Any thread."""
        return bool(self._unread)

    def launch(self, plan: StepPlan) -> bool:
        """Launch the plan's step, and count its unread tokens as known. Afterwards the step before it, if it is unread,
        must be read. Return False, and change nothing, if the plan cannot be launched in this way."""
        if not self._runner.runs_ahead:
            return False
        behind = self._unread[-1].step if self._unread else None
        if behind is not None and not isinstance(behind.tokens, PendingTokens):
            return False  # its drawing failed
        watched, launched_s = self._running.watched_in(plan), self._clock.now_s()
        self._note(watched)
        step = None
        try:
            step = self._runner.launch(plan, self._running.rows, behind)
        finally:
            if step is None:
                self._note()
        if step is None:
            return False
        self.num_steps += 1
        claims = self._slots.enter([self._running.rows[span.slot].ref for span in plan.spans])
        self._unread.append(_Unread(step, claims, watched, launched_s))
        self._running.ran(plan)
        for row in step.places:
            row.num_unread += 1
        return True

    def draw(self) -> None:
        """Launch the drawing of the unread step's tokens, unless it was launched with the step. Must be called before
        the next step is launched. Raises the error of the drawing, and so does `read` then."""
        self._runner.draw(self._unread[0].step)

    def read(self) -> None:
        """Wait for the oldest unread step, and accept its tokens. Raises the device's error if the step failed. In any
        case, the step does not use its slots any more."""
        unread = self._unread[0]
        step = unread.step
        try:
            tokens = self._runner.draw(step).result()
        finally:
            self._end_oldest()
        for row, place in step.places.items():
            self._accept(row, step.failed.get(row) or tokens[place], None, False)
        now_s, since_s = self._clock.now_s(), max(unread.launched_s, self._read_s)
        self._read_s = now_s
        self._took(step.plan, self._runner.launched_stats(step, now_s - since_s))

    def abandon(self) -> None:
        """Give up all unread steps, without waiting for the device. Their tokens are not accepted."""
        while self._unread:
            self._end_oldest()

    def run(self, plan: StepPlan, started_s: float) -> None:
        """Run a step, wait for it, and accept the tokens that its sequences sample. `started_s`: time at which the work
        on the step began."""
        self.num_steps += 1
        running, speculation = self._running, self._running.speculation
        leaders = [running.rows[span.slot] for span in plan.spans if span.samples]
        try:
            self._computed.set(running.watched_in(plan))
            self._runner.begin()
            drafts = {} if speculation is None else speculation.draft(plan, running.rows)

            def read() -> None:
                if speculation is not None:
                    speculation.read(drafts)

            verified = self._runner.run(plan, running.rows, drafts, read, needs_logits=self._is_maximal)
            running.ran(plan)
            for leader in leaders:
                running.fork(leader)
            for row, token, drafted, goes_on in verified.accept(is_maximal=self._is_maximal):
                self._accept(row, token, drafted, goes_on)
            ran = plan if speculation is None else speculation.observe(plan, drafts, verified)
        finally:
            self._computed.set(())
        round = None if speculation is None else speculation.stats
        self._took(ran, self._runner.stats(ran, self._clock.now_s() - started_s, round))

    def _took(self, ran: StepPlan, stats: StepStats) -> None:
        """Record the statistics of a step, which ran the plan `ran`."""
        self.last_step = stats
        self._running.scheduling_policy.took(ran, stats.duration_s)

    def _end_oldest(self) -> None:
        """End the use of slots by the oldest unread step, whose tokens do not count as known any more."""
        unread = self._unread.popleft()
        self._slots.leave(unread.claims)
        self._note()
        for row in unread.step.places:
            row.num_unread -= 1

    def _note(self, watched: tuple[bytes, ...] = ()) -> None:
        """Write the requests of the launched steps, and those in `watched`, to the crash note."""
        self._computed.set((*(name for each in self._unread for name in each.watched), *watched))

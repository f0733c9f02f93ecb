"""Random requests that start and end in a generation engine stepped by the test, and a check of the engine's memory
accounting meanwhile."""

import random
from dataclasses import dataclass, field

from baton.errors import ResourceExhaustedError
from baton.modeling.kv.row_memory import PagedMemory
from baton.sampling_params import SamplingParams
from baton.types import LeaseRef
from generate_workers.engine.rows import StreamId
from tests.support.engines.generation import Collector, Harness, prompt
from tests.support.kernels.os_memory import resident_bytes

MAX_PROMPT = 120
MAX_OUTPUT = 100


@dataclass
class Churn:
    """Keeps `num_open` requests open until `num_left` further ones have been submitted, and cancels some at random
    moments."""

    made: Harness
    memories: list[PagedMemory]
    """Memory of all slots."""
    rng: random.Random
    num_left: int
    num_open: int
    open: list[tuple[StreamId, Collector]] = field(default_factory=list)
    num_preemptions: int = 0
    num_cancelled: int = 0
    num_pushed: int = 0
    most_promised: int = 0
    worst_error: float = 0.0
    """Largest relative error of the engine's count of resident bytes, compared with the count of the operating
    system."""

    def run(self) -> None:
        """Step the engine until the last request has ended. Fails if no request ends for many steps."""
        num_idle = 0
        while self.num_left or self.open:
            while self.num_left and len(self.open) < self.num_open:
                self._submit()
            self.made.engine.step()
            before = len(self.open)
            for _, collector in self.open:
                if collector.ended.is_set():
                    collector.check()
                    self.made.streams.remove(collector)  # the test's own memory must not grow with the requests
            self.open = [each for each in self.open if not each[1].ended.is_set()]
            num_idle = 0 if len(self.open) < before else num_idle + 1
            assert num_idle < 5 * (MAX_PROMPT + MAX_OUTPUT) * self.num_open, "nothing ends any more"
            if self.rng.random() < 0.05:
                self._cancel()
            if self.rng.random() < 0.02:
                self._compare()
        self.num_preemptions = self.made.engine.status().num_preemptions

    def _submit(self) -> None:
        self.num_left -= 1
        rng = self.rng
        params = SamplingParams(
            max_tokens=rng.randint(1, MAX_OUTPUT),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(100),
            ignore_eos=rng.random() < 0.5,
            stop=("a",) if rng.random() < 0.2 else (),
            n=rng.choice((1, 1, 1, 2)),
        )
        ids = prompt(rng.randint(1, MAX_PROMPT), rng.randrange(5))
        ref = self._pushed(ids, params) if rng.random() < 0.2 else None
        self.open.append(self.made.submit(ids, params, ref=ref))

    def _pushed(self, ids: tuple[int, ...], params: SamplingParams) -> LeaseRef | None:
        """Return a committed lease whose slot has received the prompt's KV. Return None if no slot is free, or if the
        lease was aborted before the commit, which happens at random."""
        try:
            ref = self.made.reserve(len(ids), len(ids) + params.max_tokens, num_choices=params.n).ref
            if self.rng.random() < 0.3:
                self.made.push(ref, ids)
                self.made.slots.abort(ref)
                return None
        except ResourceExhaustedError:
            return None
        self.made.push_and_commit(ref, ids, params)
        self.num_pushed += 1
        return ref

    def _cancel(self) -> None:
        if self.open:
            self.num_cancelled += 1
            self.made.engine.cancel(self.rng.choice(self.open)[0])

    def _compare(self) -> None:
        ledger = self.made.slots.ledger()
        assert not ledger.imbalance
        self.most_promised = max(self.most_promised, ledger.kv.num_bytes_taken)
        counted, resident = ledger.num_bytes_held, sum(resident_bytes(memory) for memory in self.memories)
        self.worst_error = max(self.worst_error, abs(counted - resident) / max(resident, 1))

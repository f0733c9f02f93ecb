"""State machine of the protocol of leases, between two or more orchestrators, ranks, and one generation group. The
group's parts are real: KvReceiverServicer, ReserveBook, SeenTerms and SlotTable. Messages are delivered in any order,
some of them late, twice or never, and so are the answers. Time passes only by a rule.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import BatonError, LeaseError, ResourceExhaustedError, StaleTermError, UnavailableError
from baton.transport.kv_receiver import KvReceiverServicer
from baton.transport.kv_sink import ReserveSpec
from baton.transport.proto_types import lease_from_proto, lease_ref_to_proto
from baton.transport.terms import NO_TERM, SeenTerms, term_metadata
from baton.types import Lease, LeaseRef, Stamp
from baton.v1 import kv_pb2
from generate_workers.slots.leases import SlotState
from tests.support.engines.slot_tables import FIRST, is_empty, make_slots, push_zeros
from tests.support.manual_clock import ManualClock
from tests.support.wire.secret import SECRET

NUM_SLOTS = 2
NUM_TOKENS = 4
TTL_S = 30.0
VERB_S = 5.0
"""Seconds after which a message is not delivered any more, because its call has ended."""
MOST_ORCHESTRATORS = 3
_TIMED = (SlotState.LEASED, SlotState.COMMITTED)


@dataclass
class Message:
    """A message under way to the group."""

    verb: str
    term: int
    """Term of the sender; NO_TERM for a rank."""
    number: int = 0
    """Number of the Reserve call that the message belongs to."""
    ref: LeaseRef | None = None
    sent_s: float = 0.0


@dataclass
class Orchestrator:
    """An orchestrator, with the Reserve calls and leases that it knows. It is not told that another one has replaced
    it."""

    term: int
    waiting: set[int] = field(default_factory=set)
    """Numbers of the Reserve calls without an answer."""
    leases: dict[int, LeaseRef] = field(default_factory=dict)
    """Leases that were granted, by the number of the Reserve call. Calls about a lease may follow its abort, because
    several tasks use it."""
    in_doubt: set[int] = field(default_factory=set)
    """Numbers of the Reserve calls that are to be undone."""


class SlowPrefixes:
    """Grants leases as a node's prefix cache does: only after blocks were loaded, while other calls are served."""

    def __init__(self, reserve: Callable[[ReserveSpec], Lease]) -> None:
        self.loading: list[asyncio.Event] = []
        """An event for each Reserve call that loads blocks. When it is set, the call continues."""
        self._reserve = reserve

    async def reserve(self, spec: ReserveSpec) -> Lease:
        loaded = asyncio.Event()
        self.loading.append(loaded)
        await loaded.wait()
        return self._reserve(spec)


class LeaseProtocol(RuleBasedStateMachine):
    """Each rule is one event of the network, of a process, or of time."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock(start_s=100.0)
        self.slots = make_slots(self.clock, num_slots=NUM_SLOTS)
        self.prefixes = SlowPrefixes(self.slots.reserve)
        self.receiver = KvReceiverServicer(self.slots, cast(Any, self.prefixes), clock=self.clock)
        self.seen = SeenTerms(SECRET)
        self.highest = NO_TERM
        """Highest term of a message that was delivered."""
        self.orchestrators = [Orchestrator(term=1)]
        self.under_way: list[Message] = []
        self.granting: dict[asyncio.Task[Lease], tuple[Orchestrator, Message]] = {}
        self.num_reserves = 0
        self.stamps: dict[int, Stamp] = {}
        """Stamp of the lease that each Reserve call was granted."""
        self.numbers: dict[Stamp, int] = {}
        """Number of the Reserve call that was granted the lease with each stamp."""
        self.aborted: set[int] = set()
        """Numbers of the Reserve calls whose abort has reached the group."""

    def teardown(self) -> None:
        """When no message arrives any more, all slots become free."""
        try:
            self._let_load(len(self.prefixes.loading))
            self.clock.advance(VERB_S + TTL_S)
            self.slots.expire()
            self._end_sequences()
            assert is_empty(self.slots.ledger())
        finally:
            self._run(self._end_calls())
            self.loop.close()

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        orchestrator, self.num_reserves = self._any(data), self.num_reserves + 1
        orchestrator.waiting.add(self.num_reserves)
        self._send(Message("reserve", orchestrator.term, self.num_reserves))

    @precondition(lambda self: any(each.waiting for each in self.orchestrators))
    @rule(data=st.data())
    def give_up_waiting(self, data: st.DataObject) -> None:
        orchestrator = data.draw(st.sampled_from([each for each in self.orchestrators if each.waiting]))
        number = data.draw(st.sampled_from(sorted(orchestrator.waiting)))
        orchestrator.waiting.remove(number)
        orchestrator.in_doubt.add(number)
        self._send(Message("undo", orchestrator.term, number))

    @precondition(lambda self: any(each.in_doubt for each in self.orchestrators))
    @rule(data=st.data())
    def undo_again(self, data: st.DataObject) -> None:
        orchestrator = data.draw(st.sampled_from([each for each in self.orchestrators if each.in_doubt]))
        number = data.draw(st.sampled_from(sorted(orchestrator.in_doubt)))
        self._send(Message("undo", orchestrator.term, number))

    @precondition(lambda self: any(each.leases for each in self.orchestrators))
    @rule(data=st.data(), verb=st.sampled_from(["renew", "abort", "push", "push", "commit"]))
    def use_lease(self, data: st.DataObject, verb: str) -> None:
        orchestrator = data.draw(st.sampled_from([each for each in self.orchestrators if each.leases]))
        number = data.draw(st.sampled_from(sorted(orchestrator.leases)))
        term = orchestrator.term if verb in ("renew", "abort") else NO_TERM
        self._send(Message(verb, term, number, orchestrator.leases[number]))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "arrives twice", "answer is lost", "is lost"]))
    def deliver(self, data: st.DataObject, fate: str) -> None:
        place = data.draw(st.integers(0, len(self.under_way) - 1))
        message = self.under_way[place] if fate == "arrives twice" else self.under_way.pop(place)
        if fate != "is lost":
            self._arrive(message, hears=fate != "answer is lost")

    @precondition(lambda self: self.prefixes.loading)
    @rule()
    def load_blocks(self) -> None:
        self._let_load(1)

    @rule()
    def join_batch(self) -> None:
        """The engine lets all committed leases join its batch."""
        for slot in self.slots._slots:
            if slot.state is SlotState.COMMITTED:
                assert slot.claim is not None
                self.slots.activate(slot.claim.ref)

    @rule()
    def end_sequences(self) -> None:
        """The engine ends all sequences of its batch."""
        self._end_sequences()

    @precondition(lambda self: len(self.orchestrators) < MOST_ORCHESTRATORS)
    @rule()
    def replace_orchestrator(self) -> None:
        """Another orchestrator starts. The earlier ones may be cut off and still run."""
        self.orchestrators.append(Orchestrator(self.orchestrators[-1].term + 1))

    @rule(seconds=st.sampled_from([1.1, 1.1, 2.0, 4.5, 29.5]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.under_way = [each for each in self.under_way if not self._has_ended(each)]
        for task, (_, message) in self.granting.items():
            if self._has_ended(message):
                task.cancel()  # as gRPC does at the call's deadline
        self._settle()
        self.slots.expire()

    @invariant()
    def every_lease_ends(self) -> None:
        ledger, now_s = self.slots.ledger(), self.clock.now_s()
        assert not ledger.imbalance, ledger.imbalance
        for slot in self.slots._slots:
            if slot.state in _TIMED:
                assert slot.claim is not None and now_s < slot.claim.deadline_s <= now_s + TTL_S, slot.claim

    @invariant()
    def undone_calls_hold_no_slot(self) -> None:
        for slot in self.slots._slots:
            if slot.state in _TIMED:
                assert slot.claim is not None
                number = self.numbers[slot.claim.ref.stamp]
                assert number not in self.aborted, f"Reserve {number} was undone and holds a slot"

    async def _end_calls(self) -> None:
        for task in self.granting:
            task.cancel()
        await asyncio.gather(*self.granting, return_exceptions=True)

    def _end_sequences(self) -> None:
        for slot in self.slots._slots:
            if slot.state is SlotState.ACTIVE:
                assert slot.claim is not None
                self.slots.release(slot.claim.ref)

    def _any(self, data: st.DataObject) -> Orchestrator:
        return data.draw(st.sampled_from(self.orchestrators))

    def _has_ended(self, message: Message) -> bool:
        return self.clock.now_s() - message.sent_s > VERB_S

    def _send(self, message: Message) -> None:
        message.sent_s = self.clock.now_s()
        self.under_way.append(message)

    def _arrive(self, message: Message, *, hears: bool) -> None:
        """Let a message reach the group. `hears`: the sender gets the answer."""
        before, is_stale = self._standing(), NO_TERM != message.term < self.highest
        self.highest = max(self.highest, message.term)
        try:
            self.seen.check(f"/baton.v1.KvReceiver/{message.verb}", (*SECRET.metadata, *term_metadata(message.term)))
        except StaleTermError:
            assert is_stale, f"term {message.term} was refused after term {self.highest}"
            assert self._standing() == before
            return
        assert not is_stale, f"term {message.term} was accepted after term {self.highest}"
        sender = next((each for each in self.orchestrators if each.term == message.term), self.orchestrators[0])
        if message.verb == "reserve":
            self._begin_reserve(sender, message)
        elif message.verb == "undo":
            self.aborted.add(message.number)
            self._run(self.receiver.abort(kv_pb2.AbortRequest(number=message.number), cast(Any, None)))
            if hears:
                sender.in_doubt.discard(message.number)
        else:
            self._use(message)

    def _begin_reserve(self, sender: Orchestrator, message: Message) -> None:
        request = kv_pb2.ReserveRequest(
            request_id=f"r{message.number}",
            attempt=1,
            num_tokens=NUM_TOKENS,
            capacity_tokens=2 * NUM_TOKENS,
            ttl_s=TTL_S,
            layout_fingerprint=self.slots.layout.fingerprint,
            number=message.number,
            prefix_blocks=["a block"],
            block_tokens=NUM_TOKENS,
        )

        async def reserve() -> Lease:
            return lease_from_proto(await self.receiver.reserve(request, cast(Any, None)))

        task = self.loop.create_task(reserve())
        self.granting[task] = sender, message
        self._settle()

    def _let_load(self, num_calls: int) -> None:
        for loaded in self.prefixes.loading[:num_calls]:
            loaded.set()
        del self.prefixes.loading[:num_calls]
        self._settle()

    def _settle(self) -> None:
        """Run the loop until no Reserve call can continue, and take the answers."""
        for _ in range(4):
            self._run(asyncio.sleep(0))
        for task in [task for task in self.granting if task.done()]:
            sender, message = self.granting.pop(task)
            if task.cancelled():
                continue
            try:
                lease = task.result()
            except (LeaseError, ResourceExhaustedError, UnavailableError):
                continue  # aborted before, no room, or a copy of a call that still runs
            assert message.number not in self.aborted, f"Reserve {message.number} was granted after it was undone"
            stamp = self.stamps.setdefault(message.number, lease.ref.stamp)
            assert stamp == lease.ref.stamp, f"Reserve {message.number} was granted two leases"
            number = self.numbers.setdefault(stamp, message.number)
            assert number == message.number, "one stamp names two leases"
            if message.number in sender.waiting:
                sender.waiting.remove(message.number)
                sender.leases[message.number] = lease.ref

    def _use(self, message: Message) -> None:
        """Let a message about a lease arrive. It may have an effect only if the lease has not ended."""
        assert message.ref is not None
        before, ref = self._standing(), message.ref
        is_present = any(stamp == ref.stamp for _, stamp, _ in before)
        try:
            match message.verb:
                case "renew":
                    request = kv_pb2.RenewRequest(lease=lease_ref_to_proto(ref), ttl_s=TTL_S)
                    self._run(self.receiver.renew(request, cast(Any, None)))
                case "abort":
                    abort = kv_pb2.AbortRequest(lease=lease_ref_to_proto(ref))
                    self._run(self.receiver.abort(abort, cast(Any, None)))
                case _:
                    if message.verb == "push":
                        push_zeros(self.slots, ref, NUM_TOKENS)
                    self._run(self.slots.commit(ref, [FIRST], wait_s=0.0))
        except BatonError:
            assert self._standing() == before, f"{message.verb} failed and changed a slot"
        else:
            others = [each for each in before if each[1] != ref.stamp]
            assert all(each in self._standing() for each in others), f"{message.verb} changed another lease"
            assert is_present or message.verb == "abort", f"{message.verb} was accepted for a lease that has ended"

    def _standing(self) -> list[tuple[SlotState, Stamp, float]]:
        """Return state, stamp and deadline of each slot that is in use."""
        self.slots.expire()
        used = [slot for slot in self.slots._slots if slot.claim is not None]
        return [(slot.state, slot.claim.ref.stamp, slot.claim.deadline_s) for slot in used if slot.claim is not None]

    def _run(self, call: Awaitable[object]) -> None:
        async def run() -> None:
            await call

        self.loop.run_until_complete(run())

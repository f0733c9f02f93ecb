"""Assigns simulated requests to groups with the orchestrator's complete code (`orchestrator.placement.chooser`).

The orchestrator's Chooser examines every group, which takes milliseconds for hundreds of groups. The simulator normally
uses `baton_lab.traffic.placing`, which is faster, because it compares only a few candidate groups. Tests compare the
choices of both modules. Does no I/O.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from baton.planning.planner import ChainPlanner
from baton.process.clock import Clock
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, RequestId
from baton_lab.traffic.fleet import Fleet, Role, State
from baton_lab.traffic.placing import Asked, Spot
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView
from orchestrator.placement.chooser import Chooser, Plan
from orchestrator.placement.context import AttemptPrompt
from orchestrator.placement.options import ClusterSnapshot
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Attempt, RequestRecord
from orchestrator.requests.request import Request
from orchestrator.requests.states import RequestMove


def plan_now(chooser: Chooser, record: RequestRecord, held: ExitStack) -> Plan | None:
    """Return the groups that serve the request. Return None at once if no generation group or no prefill group is
    available; `Chooser.plan` would wait. The request's slots count as load of the generation group until `held` is
    closed."""
    groups = chooser.with_room(record, record.avoid)
    if not groups:
        return None
    snapshot = ClusterSnapshot(AttemptPrompt(chooser.context, record))
    options = chooser.cheapest(snapshot, groups)
    if chooser.lacks_chain(snapshot, options):
        return None
    held.enter_context(chooser.context.members.hold(options[0].generation.name, record.request.num_slots))
    return chooser.planned(snapshot, options)


@dataclass(frozen=True)
class _Placed:
    """Record of a request that has been assigned to groups. Closing `held` removes the request's load from these
    groups."""

    record: RequestRecord
    held: ExitStack


class WholeChooser:
    """Assigns simulated requests to groups. For each request, the orchestrator's code compares all groups of the fleet.
    Implements `baton_lab.traffic.placing.Placer`."""

    def __init__(self, fleet: Fleet, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig) -> None:
        self._fleet = fleet
        self._clock = clock
        self._members = Membership()
        self._chooser = Chooser(self._members, planner, clock, config)
        self._placed: dict[int, _Placed] = {}
        self.prefill_queues = self._members.prefill_queues
        """Job queues of the prefill groups, of the same class as in the orchestrator."""
        self.num_cached_tokens = 0
        """Number of prompt tokens whose KV was found in a prefix cache and not computed, summed over all requests so
        far."""

    def place(self, asked: Asked) -> Spot | None:
        """Choose the groups that serve the request, and record the request's load on them. Return None if no prefill
        group or no generation group is available now."""
        prefill = {each.prefill_view.name: each for each in self._fleet.of(Role.PREFILL, State.READY)}
        generation = {each.generation_view.name: each for each in self._fleet.of(Role.GENERATE, State.READY)}
        self._members.present = ClusterView(
            tuple(each.prefill_view for each in prefill.values()),
            tuple(each.generation_view for each in generation.values()),
        )
        record, held = RequestRecord.of(_request(asked), self._clock.unix_ns()), ExitStack()
        record.admit(self._clock)
        plan = plan_now(self._chooser, record, held) if prefill else None
        if plan is None or plan.chain is None:
            held.close()
            return None
        record.place(self._clock, Attempt(placement=plan.placement))
        self._placed[asked.number] = _Placed(record, held)
        if asked.blocks:
            self._chooser.context.prefixes.use(plan.chain.group.prefix_store, plan.blocks.names)
        chain, terms = plan.chain.plan, plan.placement.chain
        assert terms is not None
        self.num_cached_tokens += chain.num_cached_tokens
        return Spot(prefill[plan.chain.group.name], generation[plan.generation.name], chain, terms.transfer_s)

    def sent(self, number: int) -> None:
        """Record that the first token of request `number` has been sent."""
        record = self._placed[number].record
        record.advance(RequestMove.TOKEN)
        record.see_token(self._clock.now_s())

    def ended(self, number: int) -> None:
        """Record that request `number` has ended, and release the load that it has on its groups."""
        placed = self._placed.pop(number)
        placed.record.end_open(FinishReason.LENGTH, self._clock.unix_ns())
        placed.record.finish(self._clock.unix_ns())
        placed.held.close()


def _request(asked: Asked) -> Request:
    """Return a Request of the orchestrator whose prompt repeats one token id for each block, so that equal blocks get
    equal names."""
    ids = (block + 1 for block in asked.blocks for _ in range(asked.block_tokens))
    known = tuple(islice(ids, asked.num_tokens))
    prompt_ids = known + (0,) * (asked.num_tokens - len(known))
    return Request(RequestId(str(asked.number)), prompt_ids, SamplingParams(max_tokens=asked.num_output_tokens))

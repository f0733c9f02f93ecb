"""State of a running cluster for the autoscaler. The state includes the numbers of groups that will exist after the
changes in progress, and the waiting work. It also includes, for each role, the predicted time until the least busy
group is idle and can be stopped.

Reads the data of `orchestrator.membership` and `orchestrator.placement`, and has a list of the unfinished requests.
Runs on the asyncio loop.
"""

from orchestrator.autoscaling.actions import FleetState
from orchestrator.autoscaling.demand import Backlog, ServiceModel
from orchestrator.autoscaling.prediction import Allocation
from orchestrator.autoscaling.traffic import TrafficWindow
from orchestrator.placement.context import PlacementContext
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.states import RequestState

_UNPLACED = frozenset((RequestState.QUEUED, RequestState.PLACING))
_WITHOUT_TOKENS = _UNPLACED | {RequestState.PREFILLING}


class LiveFleet:
    """The groups and requests of a running cluster, as the autoscaler sees them."""

    def __init__(self, context: PlacementContext) -> None:
        self.window = TrafficWindow()
        """Recent arrivals and ends of requests, from which the traffic is forecast."""
        self._context = context
        self._members = context.members
        self._generation_load = context.generation_load
        self._planner = context.planner
        self._clock = context.clock
        self._service: ServiceModel | None = None
        self._records: dict[int, RequestRecord] = {}
        """Records of requests that have arrived and have not ended. The key is `id(record)`."""

    def arrived(self, record: RequestRecord) -> None:
        """Record an accepted request. A request that resumes a stream is not counted as a new arrival."""
        self._records[id(record)] = record
        if not record.request.is_resumed:
            request = record.request
            self.window.arrived(self._clock.now_s(), len(request.prompt_ids), request.params.max_tokens)

    def ended(self, record: RequestRecord) -> None:
        """Record the end of an accepted request. The lengths of its outputs are used to forecast later outputs only if
        the request was completed and did not resume an earlier stream."""
        self._records.pop(id(record), None)
        if record.is_complete and not record.request.is_resumed:
            num_cached = record.attempt.num_cached_tokens
            for choice in record.choices:
                self.window.ended(len(record.request.prompt_ids), max(len(choice.output_ids), 1), num_cached)

    def service(self) -> ServiceModel | None:
        """Return the model that predicts how long groups take to serve requests. None before the first generation group
        has started."""
        present = self._members.present
        if present.generation:
            planner = self._context.planner_of(present.groups[0])
            num_slots, costs = present.generation[0].num_slots, self._members.step_costs
            self._service = ServiceModel(planner, planner.max_ranks, num_slots, costs)
        return self._service

    def state(self, target: Allocation, service: ServiceModel, clear_s: float) -> FleetState:
        """Return the present state of the cluster. `target`: numbers of groups that the cluster will have after the
        changes in progress. `clear_s`: number of seconds within which the waiting work should be completed."""
        return FleetState(
            target,
            self._backlog(service, clear_s),
            drain_prefill_s=min(self._left_s(), default=0.0),
            drain_generate_s=min(self._streams_s(service), default=0.0),
            lends_ranks=self._planner.max_ranks > 1,
        )

    def _backlog(self, service: ServiceModel, clear_s: float) -> Backlog:
        records = self._records.values()
        unplaced = [len(each.request.prompt_ids) for each in records if each.state in _UNPLACED]
        work_s = sum(self._left_s())
        if unplaced:
            work_s += len(unplaced) * service.prompt_s(max(sum(unplaced) // len(unplaced), 1))[0]
        return Backlog(work_s, sum(1 for each in records if each.state in _WITHOUT_TOKENS), clear_s)

    def _left_s(self) -> list[float]:
        """Return, for each prefill group that is ready, the predicted seconds until its present jobs are done."""
        now_s, members = self._clock.now_s(), self._members
        return [
            sum(sum(job.left_s.values()) for job in members.prefill_queues.pending(group.incarnation, now_s))
            / len(group.endpoints)
            for group in members.view.prefill
            if group.ready
        ]

    def _streams_s(self, service: ServiceModel) -> list[float]:
        """Return, for each generation group that is ready, the predicted seconds until its present sequences end.

        Each answer is assumed to become as long as the longest recent answer to a prompt of similar length.
        """
        seconds = []
        for group in self._members.view.generation:
            if group.ready and (rows := self._generation_load.records(group.incarnation)):
                context = sum(record.num_tokens for record in rows) / len(rows)
                seconds.append(max(map(self._tokens_left, rows)) * service.step_s(len(rows), context))
            elif group.ready:
                seconds.append(0.0)
        return seconds

    def _tokens_left(self, record: RequestRecord) -> int:
        longest = self.window.longest_output(len(record.request.prompt_ids))
        most = min(record.request.params.max_tokens, longest)
        return max(most - min(len(choice.output_ids) for choice in record.choices), 1)

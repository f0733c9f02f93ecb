"""Builds the orchestrator of a process: creates its components and connects them to each other.

Called by `orchestrator.api.host`, whose `orchestrator.api.frontend` serves the components over gRPC, and by
`deploy.commands.session` without gRPC. Runs on the event loop.
"""

import asyncio
from dataclasses import dataclass, field

from baton.planning.planner import ChainPlanner
from baton.process.clock import Clock
from baton.transport.identity import ClusterSecret
from baton.transport.terms import NO_TERM
from orchestrator.actuation.actuator import Actuator
from orchestrator.actuation.fleet import LiveFleet
from orchestrator.actuation.operations import GroupOperations
from orchestrator.actuation.scaler import Scaler
from orchestrator.admission.fair_queue import FairQueue
from orchestrator.admission.forecast import ChainForecast
from orchestrator.admission.gate import Admission
from orchestrator.autoscaling.actions import LeadTimes
from orchestrator.dispatch.attempt import AttemptRunner
from orchestrator.dispatch.suspects import Suspects
from orchestrator.membership.breakers import RetryBudget
from orchestrator.membership.members import Membership
from orchestrator.observability.journal import Journal
from orchestrator.observability.state import Overview
from orchestrator.observability.traces import Traces
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.scheduler import RequestScheduler
from orchestrator.workers.client import Clients
from orchestrator.workers.worker_poller import WorkerPoller


@dataclass(kw_only=True, eq=False)
class Orchestrator:
    """Components of one orchestrator. Call `start` once, on the event loop, and `close` at the end."""

    config: OrchestratorConfig
    clock: Clock
    secret: ClusterSecret
    planner: ChainPlanner
    scheduler: RequestScheduler
    scaler: Scaler
    operations: GroupOperations
    overview: Overview
    journal: Journal
    poller: WorkerPoller
    clients: Clients
    _polling: asyncio.Task[None] | None = field(init=False, default=None)

    def start(self) -> None:
        """Start accepting requests, polling the workers, and scaling. Call it once, on the event loop."""
        self.scheduler.start()
        self._polling = asyncio.create_task(self.poller.run(self.config.poll_s))
        self.scaler.start()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop the orchestrator. Refuse new requests, wait `grace_s` seconds for running requests, then end the
        remaining ones with UnavailableError.

        Frees the slots and streams of all attempts, and closes all channels to workers. Idempotent.
        """
        await asyncio.gather(self.scheduler.close(grace_s), self.scaler.close())
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self.clients.prune(())
        await self.journal.traces.close()


def build_orchestrator(
    members: Membership,
    planner: ChainPlanner,
    clock: Clock,
    *,
    secret: ClusterSecret,
    config: OrchestratorConfig | None = None,
    traces: Traces | None = None,
    term: int = NO_TERM,
) -> Orchestrator:
    """Return an orchestrator for the groups in `members`, which may still be empty. The caller must start it.

    `planner` predicts the duration of each request's prefill. `secret` is the cluster's secret, sent with each call to
    a worker. `term` is the term of this orchestrator, sent with each call to a worker, too. `traces` receives every
    request that has ended, and is closed together with the orchestrator. If `traces` is None, traces are kept in memory
    and not exported.
    """
    config = config or OrchestratorConfig()
    journal, clients = Journal(clock, traces or Traces()), Clients(secret, term)
    attempt_runner = AttemptRunner(members, clients, planner, clock, config)
    chooser = attempt_runner.chooser
    poller = WorkerPoller(members, clients, clock, journal.stepped, lease_ttl_s=config.lease_ttl_s)
    operations = GroupOperations(members, poller)
    fleet = LiveFleet(chooser.context)
    times = LeadTimes(config.autoscaling.cold_start_s, config.autoscaling.flip_s)
    actuator = Actuator(members, operations, clock, times, lends_ranks=planner.max_ranks > 1)
    scaler = Scaler(fleet, actuator, journal.metrics, clock, config.autoscaling)
    admission = Admission(config, clock, FairQueue())
    scheduler = RequestScheduler(
        config=config,
        clock=clock,
        members=members,
        admission=admission,
        attempt_runner=attempt_runner,
        suspects=Suspects(members, clients),
        forecast=ChainForecast(chooser),
        budget=RetryBudget(clock),
        fleet=fleet,
        journal=journal,
    )
    return Orchestrator(
        config=config,
        clock=clock,
        secret=secret,
        planner=planner,
        scheduler=scheduler,
        scaler=scaler,
        operations=operations,
        overview=Overview(members, poller, admission, chooser, lambda: scaler.state),
        journal=journal,
        poller=poller,
        clients=clients,
    )

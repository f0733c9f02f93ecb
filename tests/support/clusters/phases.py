"""Requests that are stopped in a chosen phase until the test releases them. The workers run in this process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.sampling_params import SamplingParams
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import HOST, Answer, StreamCall
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prompt
from tests.support.engines.prefixes import prefix_folder
from tests.support.engines.speculating import SPECULATING
from tests.support.eventually import eventually
from tests.support.wire.held_calls import HeldCalls, HoldingNetwork

NUM_RANKS = 3
CONFIG = OrchestratorConfig(block_tokens=16, disaggregation="always")
NUM_SLOTS = 2
VICTIM = SamplingParams(max_tokens=300, temperature=0.8, seed=7, ignore_eos=True)
"""Parameters of a request that is too long to finish during a test."""
ENDING = replace(VICTIM, max_tokens=40)
SOME_PASSES = 14
"""Number of layer passes after which a gate stops an engine. It covers a few decode steps or one round of drafts, but
never a whole answer."""
OTHER = replace(VICTIM, max_tokens=6, seed=8)
IDS = prompt(60)
OTHER_IDS = prompt(30, seed=1)


@dataclass
class Scene:
    """Cluster whose calls between workers can be held, and the request that the test interrupts (the victim)."""

    made: BareCluster
    calls: HeldCalls
    victim: SamplingParams = VICTIM
    others: list[asyncio.Task[Answer]] = field(default_factory=list)
    standing: ExitStack = field(default_factory=ExitStack)
    """Further contexts that `let_go` closes."""

    def ask(self, params: SamplingParams | None = None) -> StreamCall:
        """Send the victim's request."""
        return self.made.open(self.made.request(IDS, params or self.victim))

    def ask_other(self) -> None:
        """Send a further request, which the test does not interrupt."""
        self.others.append(asyncio.create_task(self.made.ask(self.made.request(OTHER_IDS, OTHER))))

    async def until_held(self) -> None:
        await self.calls.until_reached()

    async def num_jobs(self) -> int:
        """Return the number of jobs on all ranks."""
        return sum(rank.engine.status().num_jobs for rank in self.made.ranks)

    async def num_standing(self) -> int:
        """Return the number of calls that are held now."""
        return self.calls.num_standing

    def let_go(self) -> None:
        """Release everything: open all gates, pass all held calls, and close `standing`."""
        for gate in (*self.made.rank_gates, *self.made.group_gates):
            gate.open()
        self.calls.release()
        self.standing.close()

    async def end_step(self) -> None:
        """Release everything as `let_go` does. But if an engine was stopped in a step that runs only the victim, stop
        it again after `SOME_PASSES`. The slot stays held then if the engine did not remove the victim's sequence."""
        standing = [gate for gate in self.made.group_gates if gate.reached.is_set() and not gate.opened.is_set()]
        if self.others or not standing:
            self.let_go()
            return
        await eventually(self._has_given_back, bool)  # the engine must receive the cancellation before it stops again
        self.let_go()
        for gate in standing:
            gate.shut(SOME_PASSES)

    async def _has_given_back(self) -> bool:
        return not self.made.server.orchestrator.scheduler.attempt_runner._lease_reaper._tasks

    async def forgotten(self) -> bool:
        """Return True if the orchestrator queues and runs no requests except the uninterrupted ones."""
        state = await self.made.state()
        return state.num_queued + state.num_running == sum(not other.done() for other in self.others)

    async def held(self) -> list[int]:
        """Return the numbers of held resources: slots, bytes and streams of the engine, streams kept for an
        orchestrator, jobs of each rank, and jobs that the orchestrator tracks."""
        (group,) = self.made.groups
        ledger = group.slots.ledger()
        assert not ledger.imbalance, ledger
        return [
            ledger.num_slots - ledger.num_free,
            ledger.num_bytes_held,
            group.engine.status().num_streams,
            len(group._servicer._streams.kept()),
            *(rank.engine.status().num_jobs for rank in self.made.ranks),
            len(self.made.members.prefill_queues),
        ]

    async def until_free(self) -> None:
        await eventually(self.held, lambda counts: not any(counts))


async def queued(scene: Scene) -> StreamCall:
    """Leave the request in the queue, because all slots are in use."""
    (gate,) = scene.made.group_gates
    gate.shut()
    for _ in range(NUM_SLOTS):
        scene.ask_other()
    await gate.until_reached()
    await eventually(scene.made.state, lambda state: state.num_running == NUM_SLOTS)
    call = scene.ask()
    await eventually(scene.made.state, lambda state: state.num_queued == 1)
    return call


async def reserving(scene: Scene) -> StreamCall:
    """Stop when the slot is leased, but the answer to Reserve has not reached the orchestrator."""
    scene.calls.hold("Reserve", answer=True)
    call = scene.ask()
    await scene.until_held()
    return call


async def reserved(scene: Scene) -> StreamCall:
    """Stop when the slot is leased, but no rank has started."""
    scene.calls.hold("Run")
    call = scene.ask()
    await scene.until_held()
    return call


def chunk_on(rank: int) -> "Phase":
    """Return a phase that stops the given rank within a layer. Other ranks are ahead of it or wait for it."""

    async def reach(scene: Scene) -> StreamCall:
        scene.made.rank_gates[rank].shut()
        call = scene.ask()
        await scene.made.rank_gates[rank].until_reached()
        return call

    return reach


async def transferring(scene: Scene) -> StreamCall:
    """Stop when all KV is computed and its transfer has started."""
    scene.calls.hold("PushShared")
    call = scene.ask()
    await scene.until_held()
    ranks = scene.made.ranks
    await eventually(scene.num_standing, lambda number: number == len(ranks))
    return call


async def committing(scene: Scene) -> StreamCall:
    """Stop when all KV has arrived and the first token is being sent."""
    scene.calls.hold("Commit")
    call = scene.ask()
    await scene.until_held()
    return call


async def inserting(scene: Scene) -> StreamCall:
    """Stop when the slot has its first token and waits for the end of the current step to join the batch."""
    (gate,) = scene.made.group_gates
    gate.shut()
    scene.ask_other()
    await gate.until_reached()
    scene.calls.hold("Commit", answer=True)
    call = scene.ask()
    await scene.until_held()
    return call


async def prefilling_locally(scene: Scene) -> StreamCall:
    """Remove the prefill group, and stop the engine within a step that computes the prompt's first tokens."""
    scene.made.members.update(replace(scene.made.view(), prefill=()))
    (gate,) = scene.made.group_gates
    gate.shut()
    call = scene.ask()
    await gate.until_reached()
    return call


async def decoding_its_own_prefill(scene: Scene) -> StreamCall:
    """Remove the prefill group, so that no slot is leased, and stop the engine within a decode step."""
    scene.made.members.update(replace(scene.made.view(), prefill=()))
    return await decoding(scene)


async def decoding(scene: Scene) -> StreamCall:
    """Stop the engine within a decode step, after two tokens have been received."""
    (gate,) = scene.made.group_gates
    gate.shut(SOME_PASSES)
    call = scene.ask()
    await Answer().read(call, 2)
    await gate.until_reached()
    return call


async def returning(scene: Scene) -> StreamCall:
    """Stop when all tokens have been received and the engine is about to copy the answer's KV to the prefix store,
    whose lock the test holds."""
    (group,), (gate,) = scene.made.groups, scene.made.group_gates
    gate.shut(SOME_PASSES)
    call, answer = scene.ask(ENDING), Answer()
    await answer.read(call, 2)
    await gate.until_reached()
    await eventually(scene.num_jobs, lambda number: number == 0)  # the ranks store the prompt's KV first
    assert group.prefixes is not None
    scene.standing.enter_context(group.prefixes.locked())
    gate.open()
    await answer.read(call, ENDING.max_tokens)
    return call


Phase = Callable[[Scene], Awaitable[StreamCall]]
PHASES: dict[str, Phase] = {
    "queued": queued,
    "reserving": reserving,
    "reserved": reserved,
    "chunk on rank 0": chunk_on(0),
    "chunk on rank 1": chunk_on(1),
    "chunk on rank 2": chunk_on(2),
    "transferring": transferring,
    "committing": committing,
    "inserting": inserting,
    "prefilling locally": prefilling_locally,
    "decoding": decoding,
    "decoding its own prefill": decoding_its_own_prefill,
    "returning": returning,
}
"""Functions by name of the phase. Each starts the victim's request, stops it in its phase, and returns its stream."""


@asynccontextmanager
async def scene(
    way: str = "off",
    device: str = "cpu",
    *,
    num_groups: int = 1,
    victim: SamplingParams = VICTIM,
    config: OrchestratorConfig = CONFIG,
) -> AsyncIterator[Scene]:
    with prefix_folder() as folder:
        async with (
            cluster(
                num_ranks=NUM_RANKS,
                num_groups=num_groups,
                num_slots=NUM_SLOTS,
                config=config,
                folders={"prefill": folder, "generate": folder},
                generate=SPECULATING[way],
                device=device,
            ) as made,
            AsyncExitStack() as stack,
        ):
            calls = HeldCalls()
            for port in (*(rank.port for rank in made.ranks), *(group.port for group in made.groups)):
                network = HoldingNetwork(calls)
                await network.open(f"{HOST}:{port}")
                stack.push_async_callback(network.close)
                made.fronts[port] = network.endpoint
            stack.callback(made.fronts.clear)
            made.members.update(made.view())
            yield (on := Scene(made, calls, victim))
            on.let_go()
            await on.until_free()

"""A request that stands still in a phase of a test's choice, before workers in this process, until it is let go."""

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
"""Never ends by itself meanwhile."""
ENDING = replace(VICTIM, max_tokens=40)
SOME_PASSES = 14
"""Layers of some steps, or of a round of drafts: never all tokens of an answer."""
OTHER = replace(VICTIM, max_tokens=6, seed=8)
IDS = prompt(60)
OTHER_IDS = prompt(30, seed=1)


@dataclass
class Scene:
    """A cluster whose workers' networks hold calls, and the request that is struck."""

    made: BareCluster
    calls: HeldCalls
    victim: SamplingParams = VICTIM
    others: list[asyncio.Task[Answer]] = field(default_factory=list)
    standing: ExitStack = field(default_factory=ExitStack)
    """What else is to be let go."""

    def ask(self, params: SamplingParams | None = None) -> StreamCall:
        """The victim."""
        return self.made.open(self.made.request(IDS, params or self.victim))

    def ask_other(self) -> None:
        """One that goes on."""
        self.others.append(asyncio.create_task(self.made.ask(self.made.request(OTHER_IDS, OTHER))))

    async def until_held(self) -> None:
        await self.calls.until_reached()

    async def num_jobs(self) -> int:
        """On all ranks."""
        return sum(rank.engine.status().num_jobs for rank in self.made.ranks)

    async def num_standing(self) -> int:
        """Calls that are held now."""
        return self.calls.num_standing

    def let_go(self) -> None:
        """The step or layer under way ends, and all calls pass."""
        for gate in (*self.made.rank_gates, *self.made.group_gates):
            gate.open()
        self.calls.release()
        self.standing.close()

    async def end_step(self) -> None:
        """Do as `let_go`. An engine that stood within a step of the victim alone stops again after `SOME_PASSES`: if it
        did not remove the victim's row, the slot stays held."""
        standing = [gate for gate in self.made.group_gates if gate.reached.is_set() and not gate.opened.is_set()]
        if self.others or not standing:
            self.let_go()
            return
        await eventually(self._has_given_back, bool)  # the engine must hear of the cancel before it stops again
        self.let_go()
        for gate in standing:
            gate.shut(SOME_PASSES)

    async def _has_given_back(self) -> bool:
        return not self.made.server.orchestrator.scheduler.attempt_runner._lease_reaper._tasks

    async def forgotten(self) -> bool:
        """The orchestrator neither queues nor runs any but the others."""
        state = await self.made.state()
        return state.num_queued + state.num_running == sum(not other.done() for other in self.others)

    async def held(self) -> list[int]:
        """Slots, bytes and streams of the engine; streams kept for an orchestrator; jobs of each rank; jobs in the
        orchestrator's book."""
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
    """All slots are taken."""
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
    """The slot is leased, and nobody has heard it."""
    scene.calls.hold("Reserve", answer=True)
    call = scene.ask()
    await scene.until_held()
    return call


async def reserved(scene: Scene) -> StreamCall:
    """The slot is leased, and no rank has begun."""
    scene.calls.hold("Run")
    call = scene.ask()
    await scene.until_held()
    return call


def chunk_on(rank: int) -> "Phase":
    """That rank stands within a layer; the others are ahead, or wait for it."""

    async def reach(scene: Scene) -> StreamCall:
        scene.made.rank_gates[rank].shut()
        call = scene.ask()
        await scene.made.rank_gates[rank].until_reached()
        return call

    return reach


async def transferring(scene: Scene) -> StreamCall:
    """All is computed, and the KV is on its way."""
    scene.calls.hold("PushShared")
    call = scene.ask()
    await scene.until_held()
    ranks = scene.made.ranks
    await eventually(scene.num_standing, lambda number: number == len(ranks))
    return call


async def committing(scene: Scene) -> StreamCall:
    """All KV is there; the first token is on its way."""
    scene.calls.hold("Commit")
    call = scene.ask()
    await scene.until_held()
    return call


async def inserting(scene: Scene) -> StreamCall:
    """The slot has its first token, and waits for the end of the step under way to become a row."""
    (gate,) = scene.made.group_gates
    gate.shut()
    scene.ask_other()
    await gate.until_reached()
    scene.calls.hold("Commit", answer=True)
    call = scene.ask()
    await scene.until_held()
    return call


async def prefilling_locally(scene: Scene) -> StreamCall:
    """There is no prefill group: the engine stands within a step that has the prompt's first tokens."""
    scene.made.members.update(replace(scene.made.view(), prefill=()))
    (gate,) = scene.made.group_gates
    gate.shut()
    call = scene.ask()
    await gate.until_reached()
    return call


async def decoding_its_own_prefill(scene: Scene) -> StreamCall:
    """As decoding, and there was never a lease."""
    scene.made.members.update(replace(scene.made.view(), prefill=()))
    return await decoding(scene)


async def decoding(scene: Scene) -> StreamCall:
    """Tokens come; the engine stands within a step."""
    (gate,) = scene.made.group_gates
    gate.shut(SOME_PASSES)
    call = scene.ask()
    await Answer().read(call, 2)
    await gate.until_reached()
    return call


async def returning(scene: Scene) -> StreamCall:
    """All tokens have come; the engine is about to copy the answer's KV to the prefix store, which somebody locks."""
    (group,), (gate,) = scene.made.groups, scene.made.group_gates
    gate.shut(SOME_PASSES)
    call, answer = scene.ask(ENDING), Answer()
    await answer.read(call, 2)
    await gate.until_reached()
    await eventually(scene.num_jobs, lambda number: number == 0)  # they keep the prompt's
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
"""Each brings a request to stand in the phase of that name."""


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

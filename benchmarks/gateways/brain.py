"""Orchestrator process of the gateway benchmark. It runs the real server; the generation groups run in another
process."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from baton.process.garbage import collect_rarely
from baton.results.completion import ModelInfo
from baton.text.tokenizer import Tokenizer
from baton.transport.identity import ClusterSecret
from benchmarks.gateways.engines import HOST, LAYOUT
from benchmarks.gateways.process import Answer, usage
from benchmarks.gateways.profile import Profile
from deploy.machine.planners import cpu_costs
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.api.checks import RequestValidator
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.composition import build_orchestrator
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup
from orchestrator.requests.config import OrchestratorConfig

MAX_TOKENS = 8192
VOCAB_SIZE = 49_152


@dataclass(frozen=True)
class Brain:
    """Arguments of the process that runs the server."""

    folder: Path
    """Folder of the model that provides the tokenizer."""
    ports: tuple[int, ...]
    """Ports of the generation groups."""
    num_slots: int
    """Number of slots of each group."""


@contextlib.asynccontextmanager
async def brain(told: Brain) -> AsyncIterator[tuple[int, Answer]]:
    """Main function of the process that runs the server. Yields the server's port, which the parent process receives
    first. Then answers three questions: `usage` returns the resources that the process has used, `profile` starts a
    profile, and `profiled` ends the profile and returns it as text."""
    members = Membership()
    planner = ChainPlanner(cpu_costs(ResolvedModel(told.folder), "bfloat16", 1), max_ranks=1, max_tokens=MAX_TOKENS)
    most = 2 * told.num_slots * len(told.ports)
    config = OrchestratorConfig(max_queued_requests=most, max_queued_tokens=1000 * most, max_running=most)
    layout = LAYOUT.fingerprint
    model = ModelInfo("scripted", MAX_TOKENS, VOCAB_SIZE, "bfloat16", True, layout)
    orchestrator = build_orchestrator(members, planner, SystemClock(), secret=ClusterSecret.new(), config=config)
    validator = RequestValidator(Tokenizer.load(told.folder), model, ())
    server = await OrchestratorServer.start(orchestrator, validator, (HOST, 0))
    groups = (
        GenerationGroup(f"generate-{index}", f"{HOST}:{port}", layout, told.num_slots, MAX_TOKENS)
        for index, port in enumerate(told.ports)
    )
    members.update(ClusterView(generation=tuple(groups)))
    collect_rarely()
    profile = Profile()

    async def answer(question: Any) -> Any:
        nonlocal profile
        if question == "usage":
            return usage()
        if question == "profile":
            profile = Profile()
            profile.start()
            return None
        assert question == "profiled", question
        return profile.stop()

    try:
        yield server.port, answer
    finally:
        await server.stop()

"""On a live cluster whose prefill groups compute on devices of two kinds, prompts go where the predictions say."""

import asyncio
import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.proto_types import params_to_proto
from baton.types import JobId, RequestId
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from baton_lab.traffic.choosing import plan_now
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView
from orchestrator.placement.chooser import Chooser
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from tests.support.manual_clock import ManualClock
from tests.support.paced.cluster import PacedPlan, paced_cluster
from tests.support.paced.hardware import PacedHardware, write_paced_model
from tests.support.paced.load import greedy, random_letters
from tests.support.paced.worker import SLOWER_GROUPS

if TYPE_CHECKING:
    from baton.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

pytestmark = [pytest.mark.integration, pytest.mark.ci]

SLOWER = {"prefill-1": 3.5}
"""The third prompt takes less behind two others on the fast rank than on the slow one, the fourth takes more."""
NUM_PROMPTS, NUM_TOKENS = 6, 6000
"""A prompt takes 1.9 s on the fast rank. Prompts that arrive up to half of this later are placed alike."""


async def test_prompts_that_arrive_together_go_to_the_devices_that_are_computed(tmp_path: Path) -> None:
    write_paced_model(tmp_path)
    (tmp_path / SLOWER_GROUPS).write_text(json.dumps(SLOWER))
    hardware = PacedHardware.load(tmp_path)
    async with paced_cluster(tmp_path, hardware, PacedPlan((2, 1))) as cluster:
        stub: OrchestratorAsyncStub = OrchestratorStub(cluster.channel)
        assert await prefilled_by(stub, NUM_PROMPTS) == "prefill-0"
        live = Counter(await asyncio.gather(*(prefilled_by(stub, number) for number in range(NUM_PROMPTS))))
        view = cluster.view()
    assert len({group.profile for group in view.prefill}) == 2
    assert live == computed(hardware, view) == {"prefill-0": 5, "prefill-1": 1}


async def prefilled_by(stub: "OrchestratorAsyncStub", number: int) -> str:
    """The prefill group that computed a prompt."""
    request = pb.GenerateRequest(
        request_id=f"prompt-{number}",
        token_ids=pb.TokenIds(ids=random_letters(NUM_TOKENS, 1, number)),
        sampling=params_to_proto(greedy(2)),
        seeded=True,
    )
    groups = [
        event.token.origin.prefill async for event in stub.Generate(request) if event.WhichOneof("event") == "token"
    ]
    return groups[0]


def computed(hardware: PacedHardware, view: ClusterView) -> Counter[str]:
    """The prefill groups that the chooser selects for prompts that arrive at the same time."""
    members, clock = Membership(), ManualClock(1000.0)
    members.update(view)
    chooser = Chooser(members, hardware.planner(max_ranks=1), clock, OrchestratorConfig())
    found = Counter[str]()
    with ExitStack() as held:
        for number in range(NUM_PROMPTS):
            ids = random_letters(NUM_TOKENS, 1, number)
            record = RequestRecord.of(Request(RequestId(str(number)), ids, greedy(2)), received_ns=0)
            record.admit(clock)
            plan = plan_now(chooser, record, held)
            assert plan is not None and plan.chain is not None
            record.place(clock)
            group = plan.chain.group
            members.prefill_queues.add(group.incarnation, JobId(number), plan.chain.plan.job, clock.now_s())
            found[group.name] += 1
    return found

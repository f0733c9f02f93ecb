"""Requests while all generation groups are drained: by operators, or by a command that brings one back."""

import asyncio
from dataclasses import replace

import httpx2
import pytest

from baton import AsyncClient
from baton.errors import DrainedError
from baton.v1 import admin_pb2, orchestrator_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from tests.support.clusters.supervision import ANSWER, CONFIG, SupervisedCluster, supervised
from tests.support.engines.generation import prompt
from tests.support.eventually import LIMIT_S, eventually
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.wire.commands import Baton
from tests.support.wire.http_gateway import http_gateway

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("known")]

HASTY = replace(CONFIG, generation_wait_s=0.3)
REMEDY = (
    "every generation group that could serve the request is drained: `baton drain generate-0 --undo` lets one have "
    "work again"
)


@pytest.mark.parametrize("keep", ["", " --keep"])
async def test_a_request_ends_with_the_remedy_when_operators_have_drained_all(keep: str, baton: Baton) -> None:
    async with supervised(config=HASTY) as made, AsyncClient(made.target) as client:
        for name in ("generate-1", "generate-0"):
            assert (await baton.run_beside(f"drain {name}{keep} --target {made.target}")).status == 0
        async with asyncio.timeout(LIMIT_S):
            stream = client.generate(token_ids=prompt(9), params=ANSWER)
            with pytest.raises(DrainedError) as ended:
                await stream.collect()
            assert (str(ended.value), stream.output.num_resumes) == (REMEDY, 0)
            async with http_gateway(made.target, letter_tokenizer()) as http, httpx2.AsyncClient() as plain:
                answer = await plain.post(f"{http.url}/v1/completions", json={"prompt": "Hi"}, timeout=LIMIT_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert answer.json()["error"]["message"] == REMEDY
        assert (await baton.run_beside(f"drain generate-0 --undo --target {made.target}")).status == 0
        assert len((await made.ask(made.request(prompt(9), ANSWER))).token_ids) == ANSWER.max_tokens


@pytest.mark.parametrize(
    ("command", "status"), [("reload --group generate-1", 0), ("scale generate 1", 0), ("flip generate-1", 1)]
)
async def test_no_request_ends_while_a_command_holds_the_last_group_for_a_time(
    command: str, status: int, baton: Baton
) -> None:
    async with supervised(config=HASTY) as made, AsyncClient(made.target) as client:
        with made.members.hold("generate-0"), made.members.hold("generate-0"):
            with made.members.hold("generate-1"):  # the command waits until it has no work left
                running = asyncio.create_task(baton.run_beside(f"{command} --target {made.target}"))
                await made.members.until(lambda: made.members.orders.drained == {"generate-1"} or None, LIMIT_S)
                made.members.drain("generate-0")
                asking = asyncio.create_task(client.generate(token_ids=prompt(9), params=ANSWER).collect())
                await eventually(lambda: ends(made), lambda errors: errors[:2] == ["NoGroupError"] * 2)
            assert (await running).status == status
        output = await asking
        assert len(output.choices[0].tokens) == ANSWER.max_tokens


async def test_a_request_ends_once_the_command_that_would_bring_a_group_back_is_given_up() -> None:
    async with supervised(config=HASTY) as made, AsyncClient(made.target) as client:
        with made.members.hold("generate-1"):
            request = admin_pb2.DrainRequest(group="generate-1", returns=True)
            draining = AdminStub(made.channel).Drain(request, timeout=LIMIT_S)
            await draining.read()
            made.members.drain("generate-0")
            asking = asyncio.create_task(client.generate(token_ids=prompt(9), params=ANSWER).collect())
            await eventually(lambda: ends(made), lambda errors: errors[:1] == ["NoGroupError"])
            draining.cancel()
            with pytest.raises(DrainedError):
                await asking


async def ends(made: SupervisedCluster) -> list[str]:
    """Names of the errors with which requests have ended."""
    asked = orchestrator_pb2.GetRequestsRequest(num_ended=10)
    found = await made.stub.GetRequests(asked, timeout=LIMIT_S, metadata=made.metadata)
    return [each.error for each in found.requests if each.error]

"""Two gateways in separate processes, in front of one orchestrator and real workers, used by the ordinary client."""

import asyncio
import contextlib
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient
from baton.errors import InvalidArgumentError
from baton.results.completion import Completion
from baton.sampling_params import SamplingParams
from baton.transport.channel import make_channel
from baton.types import FinishReason
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prompt, reference_ids
from tests.support.eventually import eventually
from tests.support.folders import ROOT
from tests.support.models.tiny_tokenizer import ids_of, write_letters
from tests.support.tools import has_ipv6
from tests.support.wire.late_streams import late_stream

pytestmark = pytest.mark.integration

SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=7, ignore_eos=True)
LONG = replace(SAMPLED, max_tokens=300)
START_S = 120.0
SERVING = health_pb2.HealthCheckResponse.SERVING


class Gateway:
    """A running `baton gateway`."""

    def __init__(self, process: Process, target: str) -> None:
        self.process = process
        self.target = target

    async def until_serving(self) -> None:
        async with make_channel(self.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def status() -> int:
                return int((await stub.Check(health_pb2.HealthCheckRequest())).status)

            await eventually(status, lambda said: said == SERVING)


@contextlib.asynccontextmanager
async def gateway_of(running: BareCluster, folder: Path, *more: str) -> AsyncIterator[Gateway]:
    target = f"{HOST}:{running.server.port}"
    arguments = ("gateway", "--orchestrator", target, "--port", "0", "--model", str(folder), "--grace", "0", *more)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cli", *arguments, cwd=ROOT, stderr=PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(START_S):
            while (found := re.search(rb"serving on (\S+)", line := await process.stderr.readline())) is None:
                assert line, "the gateway ended at once"
        gateway = Gateway(process, found.group(1).decode())
        await gateway.until_serving()
        yield gateway
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.stderr.read()
        await asyncio.wait_for(process.wait(), 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tmp_path_factory.mktemp("letters"))


@pytest.fixture
async def running() -> AsyncIterator[BareCluster]:
    async with cluster() as made:
        yield made


def token_ids(output: Completion) -> list[int]:
    return [token.token_id for token in output.tokens]


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_gateway_listens_at_an_ipv6_address(host: str, running: BareCluster, folder: Path) -> None:
    async with gateway_of(running, folder, "--host", host) as gateway, AsyncClient(gateway.target) as client:
        assert gateway.target.startswith("[::1]:")
        output = await client.generate(token_ids=prompt(9), params=SAMPLED).collect()
    assert token_ids(output) == reference_ids(running.decoder, prompt(9), SAMPLED)


@pytest.mark.ci
async def test_what_one_gateway_carries_outlives_the_others_death(running: BareCluster, folder: Path) -> None:
    gate = running.group_gates[0]
    async with contextlib.AsyncExitStack() as stack:
        starting = (stack.enter_async_context(gateway_of(running, folder)) for _ in range(2))
        doomed, other = await asyncio.gather(*starting)
        both = await stack.enter_async_context(AsyncClient(f"ipv4:{doomed.target},{other.target}"))
        one = await stack.enter_async_context(AsyncClient(other.target))
        gate.shut()  # after the first token, which a chain makes
        lost = both.generate(token_ids=prompt(30), params=LONG)
        await anext(lost)
        kept = one.generate(token_ids=prompt(20), params=LONG)
        await eventually(running.state, lambda state: state.num_running == 2)
        doomed.process.kill()
        await doomed.process.wait()
        gate.open()
        outputs = await asyncio.gather(lost.collect(), kept.collect())
    assert outputs[0].num_resumes >= 1 and outputs[1].num_resumes == 0
    assert token_ids(outputs[0]) == reference_ids(running.decoder, prompt(30), LONG)
    assert token_ids(outputs[1]) == reference_ids(running.decoder, prompt(20), LONG)


async def test_a_gateway_answers_as_the_orchestrator_does(running: BareCluster, folder: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(gateway_of(running, folder))
        direct = await stack.enter_async_context(AsyncClient(f"{HOST}:{running.server.port}"))
        through = await stack.enter_async_context(AsyncClient(gateway.target))
        for options in ({"echo": True}, {"n": 2}, {"logprobs": 2}):
            params = {"max_tokens": 12, "temperature": 0.9, "seed": 7, "ignore_eos": True, **options}
            own = await direct.generate("Hello there", **params).collect()  # type: ignore[arg-type]
            passed = await through.generate("Hello there", **params).collect()  # type: ignore[arg-type]
            assert passed.choices == own.choices
            assert passed.num_prompt_tokens == len(ids_of("Hello there"))
        assert (await through.model()) == (await direct.model())
        with pytest.raises(InvalidArgumentError, match="no chat template"):
            await through.generate(messages=[{"role": "user", "content": "Hi"}]).collect()
        await leave_and_be_late(running, through)


async def leave_and_be_late(running: BareCluster, client: AsyncClient) -> None:
    """A stream that is cancelled leaves nothing, one whose deadline passes brings its usage."""
    async with client.generate(token_ids=prompt(30), params=LONG) as stream:
        await anext(stream)
    await running.until_empty()
    running.group_gates[0].shut()
    try:
        late = await late_stream(client, prompt(30), LONG)
    finally:
        running.group_gates[0].open()
    assert (late.finish, late.usage is not None) == (FinishReason.DEADLINE, True)

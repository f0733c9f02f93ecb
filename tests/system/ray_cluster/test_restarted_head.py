"""Ray's head is killed and restarted at the same address. It keeps its state, because it stores it in Redis."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton import Client
from baton.errors import UnavailableError
from baton.modeling.checkpoints.weights import load_decoder
from baton.sampling_params import SamplingParams
from deploy.commands.ray_access import require_reachable
from tests.support import tools
from tests.support.clusters.listening import descendants
from tests.support.clusters.on_ray.hosts import Host, hosts
from tests.support.clusters.on_ray.ray_clusters import endpoints, listener, served, until, until_settled
from tests.support.clusters.on_ray.ray_heads import RayHead, held_of, ray_head, ray_node
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = pytest.mark.cluster

REDIS = tools.find_command("redis-server")
REDIS_PORT = 6399
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.mark.ci
@pytest.mark.skipif(REDIS is None, reason="needs redis-server")
def test_a_cluster_serves_without_its_ray_s_head_and_is_supervised_by_the_next(smollm2: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = stack.enter_context(hosts(2))
        stack.enter_context(redis_on(second))
        kept = {"RAY_REDIS_ADDRESS": f"{second.address}:{REDIS_PORT}"}
        head = stack.enter_context(ray_head({}, host=first, variables=kept))
        stack.enter_context(ray_node(head, {"baton_prefill": 1, "baton_generate": 2}, second))
        settings = ("prefill.num_ranks=1", f"orchestrator.host={second.address}")
        running = stack.enter_context(served(tmp_path, smollm2, *settings, address=head.address, host=second))
        client = stack.enter_context(Client(running.target))
        ask(client, smollm2, 0, head)
        with pytest.raises(UnavailableError, match="cannot be reached"):
            require_reachable(head.address)
        ask(client, smollm2, 300)

        port = int(head.address.rpartition(":")[2])
        again = stack.enter_context(ray_head({}, host=first, port=port, variables=kept))
        until(lambda: len(held_of(again.address)["nodes"]) == 2)
        (former,) = endpoints(client.cluster_state(), "generate")
        os.kill(listener(former, second), signal.SIGKILL)
        until(lambda: endpoints(client.cluster_state(), "generate") not in ((former,), ()))
        until_settled(running, client)
        grown = running.command("scale", "generate", "2")
        assert grown.returncode == 0, grown.stderr
        ask(client, smollm2, 600)

        os.kill(second.inner(running.process.pid), signal.SIGINT)
        assert running.process.wait(60) == 0
        held = held_of(again.address)
        assert not held["actors"] and not held["places"]


def ask(client: Client, smollm2: Path, start: int, doomed: RayHead | None = None) -> None:
    """An answer, which must be the model's; in the middle of it the head is killed, if one is given."""
    prompt, tokens = passage_ids(smollm2, 120, start), []
    for event in client.generate(token_ids=prompt, params=PARAMS):
        if event.token is not None:
            tokens.append(event.token.token_id)
            if len(tokens) == 10 and doomed is not None:
                for pid in descendants(doomed.process.pid):
                    os.kill(pid, signal.SIGKILL)
                doomed.process.wait()
    check_equal_tokens(load_decoder(smollm2), prompt, tokens, PARAMS)


@contextlib.contextmanager
def redis_on(host: Host) -> Iterator[None]:
    """A Redis that keeps everything in memory, on that host."""
    assert REDIS is not None
    options = ("--port", str(REDIS_PORT), "--bind", host.address, "--save", "", "--protected-mode", "no")
    command = host.command(REDIS, *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("Ready to accept connections" in line for line in process.stdout)
            yield
        finally:
            os.kill(host.inner(process.pid), signal.SIGTERM)

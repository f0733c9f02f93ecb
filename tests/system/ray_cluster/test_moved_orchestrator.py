"""The host of launcher, supervisor and orchestrator is lost. Ray restarts supervisor and orchestrator on another host,
gateways find them there, and another machine can end the cluster."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton import Client, Reconnect
from baton.sampling_params import SamplingParams
from tests.support.clusters.on_ray.gateways import GATEWAY_OUTPUT, gateway_on
from tests.support.clusters.on_ray.ray_clusters import decoder_of, run_baton, until
from tests.support.clusters.on_ray.ray_heads import held_of
from tests.support.clusters.on_ray.topologies import HostsCluster
from tests.support.engines.generation import prompt
from tests.support.models.reference import check_equal_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PARAMS = SamplingParams(max_tokens=600, ignore_eos=True)
PATIENT = Reconnect(num_resumes=120)


def test_a_stream_through_a_gateway_survives_the_loss_of_the_orchestrators_host(
    over_hosts: HostsCluster, tmp_path: Path, breaks: Callable[[], None]
) -> None:
    if not over_hosts.first.namespace:
        pytest.skip("links of loopback addresses cannot be cut")
    breaks()
    running, address, tokens = over_hosts.running, over_hosts.ray.address, []
    with (
        gateway_on(over_hosts.outside, running, "--address", address) as gateway,
        ExitStack() as lost,
        Client(gateway, reconnect=PATIENT) as client,
    ):
        for event in client.generate(token_ids=prompt(120), params=PARAMS):
            if event.token is not None:
                tokens.append(event.token.token_id)
                if len(tokens) == 10:
                    lost.enter_context(over_hosts.first.unplugged())
        check_equal_tokens(decoder_of(running.model), prompt(120), tokens, PARAMS)
        again = client.generate(token_ids=prompt(120), params=PARAMS).collect()
        assert [token.token_id for token in again.tokens] == tokens
    moved = re.search(r"has moved from (\S+) to (\S+):", (running.cache / GATEWAY_OUTPUT).read_text())
    assert moved and moved[1] == running.target and not moved[2].startswith(f"{over_hosts.first.address}:")

    assert held_of(address)["actors"]
    for text in ("stopped", "not running"):
        stopped = run_baton(tmp_path, "stop", "--address", address, host=over_hosts.head)
        assert stopped.stdout == f"cluster baton: {text} on Ray at {address}\n"
    until(lambda: not held_of(address)["actors"] and not held_of(address)["places"])

"""One cluster on several hosts, each with its own address and raylet. A prefill group and the engines use two hosts; a
gateway runs on another. Hosts are cut off, do not receive packets, or are lost."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import pytest

from baton import Client
from baton.sampling_params import SamplingParams
from tests.support.clusters.on_ray.gateways import gateway_on
from tests.support.clusters.on_ray.ray_clusters import check_answer, decoder_of, endpoints, until, until_settled
from tests.support.clusters.on_ray.ray_heads import ray_node
from tests.support.clusters.on_ray.topologies import HOST_POOLS, HostsCluster
from tests.support.engines.generation import prompt
from tests.support.models.reference import check_equal_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

SHORT = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, ignore_eos=True)
CUT_S = 10.0
"""Longer than workers may be silent, and shorter than Ray takes to give a host up."""
SETTLED_S = 240.0


@pytest.fixture
def client(over_hosts: HostsCluster) -> Iterator[Client]:
    with Client(over_hosts.running.target) as made:
        yield made


@pytest.fixture
def cuttable(over_hosts: HostsCluster) -> HostsCluster:
    """Hosts that have links."""
    if not over_hosts.first.namespace:
        pytest.skip("links of loopback addresses cannot be cut")
    return over_hosts


def test_workers_serve_at_the_addresses_of_their_nodes(over_hosts: HostsCluster, client: Client) -> None:
    state = client.cluster_state()
    both = {over_hosts.first.address, over_hosts.second.address}
    assert {each.rpartition(":")[0] for each in endpoints(state, "prefill")} == both
    assert {group.endpoints[0].rpartition(":")[0] for group in state.groups if group.role == "generate"} == both
    # Of all interfaces, the one that others reach
    assert over_hosts.running.target.startswith(f"{over_hosts.first.address}:")


def test_tokens_of_a_cluster_over_hosts_are_those_of_the_model(over_hosts: HostsCluster, client: Client) -> None:
    answer = client.generate(token_ids=prompt(300), params=SHORT).collect()
    check_answer(over_hosts.running, prompt(300), answer, SHORT)
    assert client.cluster_state().num_degraded == 0
    assert answer.timings is not None
    is_shared = [rank.num_bytes_shared > 0 for rank in answer.timings.prefill.ranks]
    if over_hosts.first.namespace:  # else all hosts are one, and KV goes through its memory
        assert sorted(is_shared) == [False, True]  # one rank lies on the engine's host


def test_a_gateway_on_another_host_streams_the_same(over_hosts: HostsCluster) -> None:
    where = ("--orchestrator", over_hosts.running.target)
    with gateway_on(over_hosts.outside, over_hosts.running, *where) as target, Client(target) as client:
        answer = client.generate(token_ids=prompt(120), params=SHORT).collect()
    check_answer(over_hosts.running, prompt(120), answer, SHORT)


def _ask(made: HostsCluster, token_ids: tuple[int, ...], strike: Callable[[], None] = lambda: None) -> None:
    """Streams an answer, which must be the model's; `strike` is called in the middle of it."""
    tokens = []
    with Client(made.running.target) as client:
        for event in client.generate(token_ids=token_ids, params=LONG):
            if event.token is not None:
                tokens.append(event.token.token_id)
                if len(tokens) == 10:
                    strike()
    assert len(tokens) == LONG.max_tokens
    check_equal_tokens(decoder_of(made.running.model), token_ids, tokens, LONG)


@pytest.mark.parametrize(
    "fault",
    [
        "unplugged",
        "not heard",
        pytest.param("deaf", marks=pytest.mark.nightly),
        pytest.param("deaf to Ray's head", marks=pytest.mark.nightly),
    ],
)
def test_a_stream_survives_a_host_that_is_cut_off_for_a_while(
    cuttable: HostsCluster, client: Client, fault: str
) -> None:
    cut = ExitStack()
    links: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "unplugged": cuttable.second.unplugged,
        "not heard": lambda: cuttable.second.mute_to(cuttable.first),
        "deaf": lambda: cuttable.first.mute_to(cuttable.second),
        "deaf to Ray's head": lambda: cuttable.head.mute_to(cuttable.second),
    }

    def strike() -> None:
        cut.enter_context(links[fault]())
        mended = threading.Timer(CUT_S, cut.close)
        mended.start()
        cut.callback(mended.cancel)

    with cut:
        _ask(cuttable, prompt(200), strike)
        _ask(cuttable, prompt(210))
    until_settled(cuttable.running, client, SETTLED_S)


@pytest.mark.nightly
def test_a_node_that_is_lost_is_done_without_and_a_new_one_is_used(
    cuttable: HostsCluster, client: Client, breaks: Callable[[], None]
) -> None:
    breaks()
    with ExitStack() as further:
        lost = further.enter_context(ExitStack())
        _ask(cuttable, prompt(200), lambda: lost.enter_context(cuttable.second.unplugged()))
        until(lambda: sum(group.is_ready for group in client.cluster_state().groups) == 1, SETTLED_S)
        further.enter_context(ray_node(cuttable.ray, HOST_POOLS, cuttable.head))
        until_settled(cuttable.running, client, SETTLED_S)
        assert cuttable.head.address in {
            each.rpartition(":")[0] for each in endpoints(client.cluster_state(), "prefill")
        }
        _ask(cuttable, prompt(210))

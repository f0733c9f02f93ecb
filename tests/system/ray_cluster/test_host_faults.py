"""Hosts that are cut off, hear nothing or are lost, under a chain and engines that lie on two of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton import Client
from baton.sampling_params import SamplingParams
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.hosts import Host, can_make_hosts, hosts
from tests.support.clusters.ray_clusters import ServedCluster, endpoints, served, until, until_settled
from tests.support.clusters.ray_heads import RayHead, ray_head, ray_node
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PARAMS = SamplingParams(max_tokens=120, ignore_eos=True)
POOLS = {"baton_prefill": 1, "baton_generate": 1}
SETTLED_S = 240.0


@dataclass(frozen=True)
class Pair:
    """A cluster whose chain has a rank on each of two hosts, and an engine on each as well."""

    running: ServedCluster
    ray: RayHead
    head: Host
    first: Host
    second: Host

    def ask(self, smollm2: Path, start: int, strike: Callable[[], None]) -> None:
        """Streams an answer, which must be the model's; `strike` is called in the middle of it."""
        prompt = passage_ids(smollm2, 200, start)
        tokens = []
        with Client(self.running.target) as client:
            for event in client.generate(token_ids=prompt, params=PARAMS):
                if event.token is not None:
                    tokens.append(event.token.token_id)
                if len(tokens) == 10:
                    strike()
        check_equal_tokens(load_decoder(smollm2), prompt, tokens, PARAMS)


@pytest.fixture(scope="module")
def pair(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not can_make_hosts():
        pytest.skip("links of loopback addresses cannot be cut")
    with ExitStack() as stack:
        head, first, second = stack.enter_context(hosts(3))
        ray = stack.enter_context(ray_head({}, host=head))
        for host in (first, second):
            stack.enter_context(ray_node(ray, POOLS, host))
        settings = ("prefill.across_nodes=true", "generate.num_groups=2", "orchestrator.host=0.0.0.0")
        cache = tmp_path_factory.mktemp("pair")
        running = stack.enter_context(served(cache, smollm2, *settings, address=ray.address, host=head))
        yield Pair(running, ray, head, first, second)


def test_a_chain_lies_on_two_hosts(pair: Pair, smollm2: Path) -> None:
    with Client(pair.running.target) as client:
        state = client.cluster_state()
        assert {each.rpartition(":")[0] for each in endpoints(state, "prefill")} == {
            pair.first.address,
            pair.second.address,
        }
        assert pair.running.target.startswith(f"{pair.head.address}:")  # of all interfaces, the one that others reach
        pair.ask(smollm2, 0, lambda: None)
        until_settled(pair.running, client)


@pytest.mark.parametrize("fault", ["unplugged", "deaf to the head", "not heard by the head", "deaf to the other"])
def test_a_stream_survives_a_host_that_is_cut_off_for_a_while(pair: Pair, smollm2: Path, fault: str) -> None:
    cut = ExitStack()
    links: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "unplugged": pair.second.unplugged,
        "deaf to the head": lambda: pair.head.mute_to(pair.second),
        "not heard by the head": lambda: pair.second.mute_to(pair.head),
        "deaf to the other": lambda: pair.first.mute_to(pair.second),
    }

    def strike() -> None:
        cut.enter_context(links[fault]())
        mended = threading.Timer(12.0, cut.close)
        mended.start()
        cut.callback(mended.cancel)

    with cut:
        pair.ask(smollm2, 300, strike)
        pair.ask(smollm2, 600, lambda: None)
    with Client(pair.running.target) as client:
        until_settled(pair.running, client, SETTLED_S)


@pytest.mark.nightly
def test_a_node_that_is_lost_is_done_without_and_a_new_one_is_used(smollm2: Path, pair: Pair) -> None:
    """Last of this file: one of the cluster's nodes is another one afterwards."""
    with ExitStack() as further, Client(pair.running.target) as client:
        lost = ExitStack()

        def strike() -> None:
            lost.enter_context(pair.second.unplugged())

        pair.ask(smollm2, 900, strike)
        until(lambda: sum(group.is_ready for group in client.cluster_state().groups) == 1, SETTLED_S)
        further.enter_context(ray_node(pair.ray, POOLS, pair.head))
        until_settled(pair.running, client, SETTLED_S)
        state = client.cluster_state()
        assert pair.head.address in {each.rpartition(":")[0] for each in endpoints(state, "prefill")}
        pair.ask(smollm2, 1200, lambda: None)
        lost.close()

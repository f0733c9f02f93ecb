"""One cluster on several hosts, each a raylet with an address of its own: prefill, generation and a gateway apart."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton import Client
from baton.results.completion import Completion
from baton.sampling_params import SamplingParams
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.hosts import Host, hosts
from tests.support.clusters.ray_clusters import (
    ServedCluster,
    endpoints,
    served,
    share_measurements,
    until,
    until_settled,
)
from tests.support.clusters.ray_heads import RayHead, ray_head, ray_node
from tests.support.folders import ROOT
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
START_S = 30.0
TURN_TOKENS = (240, 130, 212, 150)
"""New tokens of each turn of a chat; blocks have 128."""
NUM_CACHED = [0, 256, 384, 640]
"""Tokens of each turn that are found in caches."""


@dataclass(frozen=True)
class Spread:
    """A cluster over hosts: the head with launcher and orchestrator, one that prefills, and one that generates."""

    running: ServedCluster
    ray: RayHead
    head: Host
    prefill: Host
    generate: Host


@pytest.fixture(scope="module")
def spread(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    cache = tmp_path_factory.mktemp("spread")
    with ExitStack() as stack:
        head, prefill, generate = stack.enter_context(hosts(3))
        ray = stack.enter_context(ray_head({}, host=head))
        stack.enter_context(ray_node(ray, {"baton_prefill": 2}, prefill))
        stack.enter_context(ray_node(ray, {"baton_generate": 1}, generate))
        everywhere = f"orchestrator.host={head.address}"
        running = stack.enter_context(served(cache, smollm2, everywhere, address=ray.address, host=head))
        yield Spread(running, ray, head, prefill, generate)


def test_workers_serve_at_the_addresses_of_their_nodes(spread: Spread) -> None:
    with Client(spread.running.target) as client:
        state = client.cluster_state()
    assert {each.rpartition(":")[0] for each in endpoints(state, "prefill")} == {spread.prefill.address}
    assert {each.rpartition(":")[0] for each in endpoints(state, "generate")} == {spread.generate.address}


def test_tokens_of_a_cluster_over_hosts_are_those_of_the_model(spread: Spread, smollm2: Path) -> None:
    prompt = passage_ids(smollm2, 300)
    with Client(spread.running.target) as client:
        answer = _ask(client, prompt)
        until_settled(spread.running, client)
        assert client.cluster_state().num_degraded == 0
    check_equal_tokens(load_decoder(smollm2), prompt, _ids(answer), PARAMS)
    assert answer.timings is not None
    ranks = answer.timings.prefill.ranks
    assert ranks
    if spread.prefill.namespace:  # else all hosts are one, and KV goes through its memory
        assert [rank.num_bytes_shared for rank in ranks] == [0] * len(ranks)


def test_a_gateway_on_another_host_streams_the_same(spread: Spread, smollm2: Path) -> None:
    prompt = passage_ids(smollm2, 120)
    with Client(spread.running.target) as client:
        direct = _ask(client, prompt)
    with _gateway(spread, smollm2) as target, Client(target) as client:
        through = _ask(client, prompt)
    assert _ids(through) == _ids(direct)


def test_a_chat_over_hosts_computes_as_little_as_on_one(
    spread: Spread, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with served(tmp_path_factory.mktemp("one"), smollm2) as one_host:
        here = _chat(one_host, smollm2)
    num_tries = 0
    while True:  # a fetch has as long as it saves, and a crowded machine may hold it up for more
        there = _chat(spread.running, smollm2, cache_salt=f"try {num_tries}")
        num_tries += 1
        if [_num_cached(turn) for turn in there] == NUM_CACHED or num_tries == 3:
            break
    assert [_num_cached(turn) for turn in here] == [_num_cached(turn) for turn in there] == NUM_CACHED
    assert [_ids(turn) for turn in here] == [_ids(turn) for turn in there]
    if spread.prefill.namespace:  # else all hosts share their memory, and so the blocks
        fetched = [turn.timings is not None and turn.timings.prefill.fetch is not None for turn in there]
        assert fetched == [False, True, False, True]


def test_a_node_that_joins_is_used_by_a_pool_that_grows(spread: Spread, smollm2: Path) -> None:
    prompt = passage_ids(smollm2, 150)
    with ray_node(spread.ray, {"baton_generate": 1}, spread.head), Client(spread.running.target) as client:
        grown = spread.running.command("scale", "generate", "2")
        assert grown.returncode == 0, grown.stderr
        hosts_of = {group.endpoints[0].rpartition(":")[0] for group in client.cluster_state().groups[1:]}
        assert hosts_of == {spread.generate.address, spread.head.address}
        _ask(client, prompt)
        shrunk = spread.running.command("scale", "generate", "1")
        assert shrunk.returncode == 0, shrunk.stderr
        until_settled(spread.running, client)


def _ask(client: Client, prompt: tuple[int, ...], cache_salt: str = "") -> Completion:
    return client.generate(token_ids=prompt, params=PARAMS, cache_salt=cache_salt).collect()


def _ids(answer: Completion) -> list[int]:
    return [token.token_id for token in answer.tokens]


def _num_cached(turn: Completion) -> int:
    assert turn.usage is not None
    return turn.usage.num_cached_tokens


def _chat(running: ServedCluster, model: Path, cache_salt: str = "") -> list[Completion]:
    """Four turns, each asked once the one before holds nothing any more. The second and the fourth find a block that
    only an answer completed. Turns with another salt share nothing."""
    turns: list[Completion] = []
    prompt: tuple[int, ...] = ()
    with Client(running.target) as client:
        for number, num_tokens in enumerate(TURN_TOKENS):
            prompt += passage_ids(model, num_tokens, start=3000 + 500 * number)
            turns.append(_ask(client, prompt, cache_salt))
            prompt += tuple(_ids(turns[-1]))
            until_settled(running, client)
    return turns


@contextlib.contextmanager
def _gateway(spread: Spread, model: Path) -> Iterator[str]:
    """The address of a gateway on the host that generates."""
    host, output = spread.generate, spread.running.cache / "gateway.txt"
    arguments = ("--orchestrator", spread.running.target, "--host", host.address, "--port", "0", "--model", str(model))
    command = host.command(sys.executable, "-m", "deploy.cli", "gateway", *arguments, "--grace", "0")
    share_measurements(spread.running.cache)
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stderr=file, start_new_session=True)
    try:
        until(lambda: process.poll() is not None or "serving on" in output.read_text(), START_S)
        found = re.search(r"serving on (\S+)", output.read_text())
        assert found, output.read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)

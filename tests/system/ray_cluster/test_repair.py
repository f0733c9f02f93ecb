"""A cluster on Ray that loses a process, killed or stopped, while streams run: they end as if nothing had been."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from baton import Client
from baton.results import Completion
from baton.resume import Reconnect
from baton.sampling_params import SamplingParams
from baton.streams import Stream
from deploy.commands.record import process_start
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.ray_clusters import (
    ServedCluster,
    endpoints,
    listener,
    num_jobs,
    served,
    supervisor,
    supervisors,
    until,
    until_settled,
)
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SETTINGS = ("supervision.heartbeat_s=0.5", "supervision.dead_after_s=3", "orchestrator.lease_ttl_s=15")
Answers = dict[tuple[int, ...], tuple[list[int], str]]
"""By prompt: tokens and text."""
LOSSES = (signal.SIGKILL, signal.SIGSTOP)
LOSS_PARAMS = (LOSSES[0], pytest.param(LOSSES[1], marks=pytest.mark.ci))


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with served(tmp_path_factory.mktemp("cache"), smollm2, *SETTINGS) as running:
        yield running
        assert not running.stdout  # what Ray has to say of lost workers


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[Client]:
    with Client(cluster.target) as made:
        yield made


@pytest.fixture(scope="module")
def answers(cluster: ServedCluster, smollm2: Path) -> Answers:
    """Prompts, three short and the last long, and what an undisturbed stream brings for each."""
    prompts = [passage_ids(smollm2, 30 + 50 * index, start=200 * index) for index in range(3)]
    prompts.append(passage_ids(smollm2, 900))
    with Client(cluster.target) as client, ThreadPoolExecutor(len(prompts)) as pool:
        whole = pool.map(lambda prompt: client.generate(token_ids=prompt, params=LONG).collect(), prompts)
        return {prompt: _content(each) for prompt, each in zip(prompts, whole, strict=True)}


def _running(client: Client, answers: Answers) -> list[Stream]:
    """A stream for each prompt: the short ones' tokens come, the long one is being prefilled."""
    *short, long = answers
    streams = [client.generate(token_ids=prompt, params=LONG) for prompt in short]
    for stream in streams:
        next(stream)
    streams.append(client.generate(token_ids=long, params=LONG))
    until(lambda: client.cluster_state().num_running == len(answers))
    return streams


def _collect(streams: list[Stream], answers: Answers) -> list[Completion]:
    """All streams bring what they should."""
    with ThreadPoolExecutor(len(streams)) as pool:
        got = list(pool.map(Stream.collect, streams))
    assert [_content(each) for each in got] == list(answers.values())
    return got


def _content(completion: Completion) -> tuple[list[int], str]:
    return [token.token_id for token in completion.tokens], completion.text


def test_sixteen_concurrent_streams_equal_one_process(client: Client, smollm2: Path) -> None:
    params = replace(LONG, max_tokens=16)
    prompts = [passage_ids(smollm2, 20 + 9 * index, start=60 * index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda ids: client.generate(token_ids=ids, params=params).collect(), prompts))
    decoder = load_decoder(smollm2, dtype="float32")
    for prompt, each in zip(prompts, got, strict=True):
        tokens, _ = _content(each)
        assert len(tokens) == params.max_tokens
        check_equal_tokens(decoder, prompt, tokens, params)
    until_settled(client)


@pytest.mark.parametrize(
    ("role", "with_signal"),
    [pytest.param("prefill", signal.SIGSTOP, marks=pytest.mark.ci), ("generate", signal.SIGKILL)],
)
def test_a_stream_survives_a_lost_worker(
    cluster: ServedCluster, client: Client, smollm2: Path, role: str, with_signal: signal.Signals
) -> None:
    prompt = passage_ids(smollm2, 900, start=1000 if role == "prefill" else 2000)  # of which no prefix is cached
    num_told = len(cluster.stderr)
    victim = listener(endpoints(client.cluster_state(), role)[-1])
    stream = client.generate(token_ids=prompt, params=LONG)
    if role == "generate":
        next(stream)
    else:
        until(lambda: num_jobs(endpoints(client.cluster_state(), role)[-1]) > 0)
    os.kill(victim, with_signal)
    got = stream.collect()
    tokens, _ = _content(got)
    assert len(tokens) == LONG.max_tokens
    check_equal_tokens(load_decoder(smollm2, dtype="float32"), prompt, tokens, LONG)
    assert got.usage is not None
    assert got.usage.num_attempts >= 2
    until_settled(client)
    assert not process_start(victim)
    told = rf"^{role}-0\S* ended with \w+(: replacing it|, 2 times in a row: )"
    assert re.search(told, cluster.stderr[num_told:], re.MULTILINE)


@pytest.mark.parametrize("with_signal", LOSS_PARAMS)
def test_streams_survive_a_lost_supervisor(
    cluster: ServedCluster, client: Client, answers: Answers, with_signal: signal.Signals
) -> None:
    workers = endpoints(client.cluster_state(), "prefill")
    victim = supervisor(cluster.ray_folder)
    streams = _running(client, answers)
    os.kill(victim, with_signal)
    _collect(streams, answers)
    until(lambda: bool(supervisors(cluster.ray_folder) - {victim}))
    until_settled(client)
    assert not process_start(victim)
    assert endpoints(client.cluster_state(), "prefill") == workers


@pytest.mark.parametrize("with_signal", LOSS_PARAMS)
def test_streams_survive_a_lost_orchestrator(
    cluster: ServedCluster, client: Client, answers: Answers, with_signal: signal.Signals
) -> None:
    workers = endpoints(client.cluster_state(), "prefill")
    victim = listener(cluster.target)
    streams = _running(client, answers)
    os.kill(victim, with_signal)
    *short, _ = _collect(streams, answers)
    for each in short:  # they ran on meanwhile: nothing was prefilled again
        assert each.num_resumes
        assert each.timings is not None and each.timings.prefill.ranks == ()
    until_settled(client)
    assert listener(cluster.target) != victim
    assert not process_start(victim)
    assert endpoints(client.cluster_state(), "prefill") == workers


@pytest.mark.soak
def test_streams_survive_supervisor_and_orchestrator_lost_at_once(cluster: ServedCluster, answers: Answers) -> None:
    with Client(cluster.target, reconnect=Reconnect(num_resumes=30)) as client:
        streams = _running(client, answers)
        victims = (listener(cluster.target), supervisor(cluster.ray_folder))
        for victim, with_signal in zip(victims, LOSSES, strict=True):
            os.kill(victim, with_signal)
        _collect(streams, answers)
        until_settled(client)
        assert not any(process_start(victim) for victim in victims)

"""A cluster on Ray, started as users start it: limits hold, operators' commands work, and workers that are killed or
stopped are replaced while streams continue unaffected."""

import itertools
import os
import re
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from baton import Client
from baton.calls.resume import Reconnect
from baton.calls.streams import Stream
from baton.errors import BatonError, DeadlineExceededError, ResourceExhaustedError
from baton.results.completion import Completion
from baton.sampling_params import SamplingParams
from deploy.commands.record import process_start
from tests.support.clusters.listening import descendants, listeners
from tests.support.clusters.on_ray.ray_clusters import (
    ServedCluster,
    check_answer,
    endpoints,
    listener,
    num_jobs,
    processes_of,
    secret_of,
    supervisor,
    supervisors,
    until,
    until_settled,
)
from tests.support.clusters.on_ray.topologies import CORE, NUM_ENGINES, NUM_QUEUED, NUM_SLOTS
from tests.support.engines.generation import prompt

pytestmark = pytest.mark.cluster

SHORT = SamplingParams(max_tokens=16, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, ignore_eos=True)
MIDDLE = SamplingParams(max_tokens=1000, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=3500, ignore_eos=True)
PROMPTS = (prompt(30), prompt(80), prompt(130), prompt(900))
"""Three short ones, and a long one."""


def test_all_that_listens_is_reached_from_this_machine_alone(one_host: ServedCluster) -> None:
    found = listeners(descendants(one_host.process.pid) | processes_of(one_host.ray_folder).keys())
    commands = " ".join(each.command for each in found)
    assert all(part in commands for part in ("gcs_server", "raylet", "SupervisorActor", "WorkerActor")), commands
    assert [each for each in found if not each.is_local] == []


def _ask(client: Client, token_ids: tuple[int, ...], params: SamplingParams = SHORT) -> Completion:
    return client.generate(token_ids=token_ids, params=params).collect()


def test_beyond_the_queue_a_request_is_refused_at_once_and_told_when_to_come_back(
    one_host: ServedCluster, client: Client
) -> None:
    num_taken = NUM_ENGINES * NUM_SLOTS + NUM_QUEUED
    taken = [client.generate(token_ids=prompt(20), params=ENDLESS) for _ in range(num_taken)]
    until(lambda: client.cluster_state().num_queued == NUM_QUEUED)
    with pytest.raises(ResourceExhaustedError, match=f"the queue holds {NUM_QUEUED}") as refused:
        _ask(client, prompt(20))
    assert refused.value.retry_after_s
    for stream in taken:
        stream.cancel()


@pytest.mark.parametrize("num_tokens", [20, 3000], ids=["while tokens come", "during prefill"])
def test_a_client_that_leaves_frees_everything(one_host: ServedCluster, client: Client, num_tokens: int) -> None:
    streams = [client.generate(token_ids=prompt(num_tokens + each), params=LONG) for each in range(NUM_SLOTS)]
    if num_tokens == 20:
        next(streams[0])
    else:
        until(lambda: num_jobs(endpoints(client.cluster_state(), "prefill")[0], secret_of(one_host.cache)) > 0)
    for stream in streams:
        stream.cancel()
    until_settled(one_host, client)


def test_a_deadline_brings_usage_as_the_last_message(one_host: ServedCluster, client: Client) -> None:
    num_tries = 0
    while True:  # a client listens for a second more, whatever has come by then
        streams = [client.generate(token_ids=prompt(20), params=ENDLESS, deadline_s=2) for _ in range(NUM_SLOTS)]
        stream = streams[-1]
        with pytest.raises(DeadlineExceededError):
            stream.collect()
        num_tries += 1
        if (stream.usage is not None and stream.output.tokens) or num_tries == 3:
            break
    assert stream.usage is not None
    assert stream.usage.num_output_tokens == len(stream.output.tokens) > 0


def test_the_orchestrator_stays_on_its_cores(one_host: ServedCluster) -> None:
    threads = Path(f"/proc/{listener(one_host.target)}/task").iterdir()
    assert {core for thread in threads for core in os.sched_getaffinity(int(thread.name))} == {CORE}


def test_status_shows_the_groups_and_drafts_which_a_stream_shows_at_its_end(one_host: ServedCluster) -> None:
    options = ("--target", one_host.target, "--max-tokens", "24", "--ignore-eos")
    shown = one_host.command("generate", *options, "One, two,")
    assert shown.returncode == 0, shown.stderr
    told = r"24 output tokens; .*; \d+ steps, drafts accepted: \w+ \d+ of \d+ \(\d+%; \d\.\d a round\)"
    assert re.search(told, shown.stderr)
    told = r"^generate-\d: drafts accepted so far: .*streaming \d+ of \d+ .*; latest round: "
    until(lambda: bool(re.search(told, one_host.command("status").stdout, re.MULTILINE)))
    status = one_host.command("status").stdout
    assert {"prefill-0", "generate-0", "generate-1"} <= set(status.split())
    devices = re.findall(r"^(.*) on .*, \d+ threads?.*: [\d.]+ GFLOP/s in matrices, .* GB/s \(", status, re.MULTILINE)
    assert sorted(name for names in devices for name in names.split(", ")) == ["generate-0", "generate-1", "prefill-0"]


@pytest.mark.ci
def test_rates_are_not_measured_next_to_a_running_cluster(one_host: ServedCluster) -> None:
    refused = one_host.command("calibrate", "--device", "cpu")
    assert refused.returncode == 1
    assert "runs on this machine: end it with `baton stop`, or add --anyway" in refused.stderr


@pytest.mark.ci
def test_a_drained_group_stays_so_in_the_orchestrators_next_life_and_metrics_where_they_were(
    one_host: ServedCluster, client: Client
) -> None:
    metrics = client.cluster_state().metrics_endpoint
    drained = one_host.command("drain", "prefill-0", "--keep")
    assert (drained.returncode, drained.stdout) == (0, "prefill-0 is drained: it has nothing left to do\n")
    assert "prefill-0 drained" in " ".join(one_host.command("status").stdout.split())
    os.kill(listener(one_host.target), signal.SIGKILL)
    until(lambda: _is_drained(client))
    assert len(_ask(client, prompt(300)).tokens) == SHORT.max_tokens
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    assert 'baton_group_drained{group="prefill-0",role="prefill"} 1.0' in text
    assert 'baton_disagg_decisions_total{reason="no_prefill_groups"} 1.0' in text
    assert one_host.command("drain", "prefill-0", "--undo").returncode == 0


def _is_drained(client: Client) -> bool:
    try:
        groups = client.cluster_state().groups
    except BatonError:
        return False  # no orchestrator yet
    return [group.name for group in groups if group.is_drained] == ["prefill-0"]


def test_openais_api_is_served_and_comes_back_when_its_process_ends(one_host: ServedCluster, client: Client) -> None:
    until(lambda: "OpenAI's API over HTTP: " in one_host.stderr)
    found = re.search(r"OpenAI's API over HTTP: (\S+)/v1", one_host.stderr)
    assert found and f"OpenAI's API on {found[1]}/v1" in one_host.command("status").stdout
    with OpenAI(base_url=f"{found[1]}/v1", api_key="any", max_retries=0, timeout=60) as openai:
        (model,) = openai.models.list()
        asked: dict[str, Any] = {"model": model.id, "prompt": "Once upon", "max_tokens": 8, "temperature": 0}
        expected = client.generate("Once upon", max_tokens=8).collect().text
        assert openai.completions.create(**asked).choices[0].text == expected
        told: dict[str, Any] = {"model": model.id, "max_output_tokens": 1, "temperature": 0}
        answer = openai.responses.create(input="Why is the sky blue?", **told)
        assert answer.status == "incomplete" and answer.usage is not None and answer.usage.output_tokens == 1
        again = openai.responses.create(input="Why?", previous_response_id=answer.id, **told)
        assert again.usage is not None and again.usage.input_tokens > answer.usage.input_tokens
        os.kill(_http_process(one_host), signal.SIGKILL)
        until(lambda: "the HTTP gateway has ended (status -9)" in one_host.stderr)
        assert openai.completions.create(**asked).choices[0].text == expected  # the launcher keeps the address


def _http_process(one_host: ServedCluster) -> int:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(one_host.process.pid)}
    (found,) = (pid for pid, command in commands.items() if b"deploy.front_doors.http_process" in command)
    return found


def test_a_second_cluster_of_the_same_name_is_refused(one_host: ServedCluster) -> None:
    refused = one_host.command("serve", "--set", f"model.name={one_host.model}")
    assert refused.returncode == 2
    assert refused.stderr.startswith("baton: cluster baton is running")
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.ci
def test_sixteen_concurrent_streams_equal_one_process(one_host: ServedCluster, client: Client) -> None:
    prompts = [prompt(20 + 9 * index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for token_ids, got in zip(prompts, pool.map(lambda ids: _ask(client, ids), prompts), strict=True):
            check_answer(one_host, token_ids, got, SHORT)


# What is lost is replaced.


def _running(client: Client) -> list[Stream]:
    """A stream for each prompt: the short ones' tokens come, the long one is being prefilled."""
    *short, long = PROMPTS
    streams = [client.generate(token_ids=token_ids, params=MIDDLE) for token_ids in short]
    for stream in streams:
        next(stream)
    streams.append(client.generate(token_ids=long, params=LONG))
    until(lambda: client.cluster_state().num_running == len(PROMPTS))
    return streams


def _collect(one_host: ServedCluster, streams: list[Stream]) -> list[Completion]:
    """All streams bring what they should."""
    with ThreadPoolExecutor(len(streams)) as pool:
        got = list(pool.map(Stream.collect, streams))
    for token_ids, each in zip(PROMPTS, got, strict=True):
        check_answer(one_host, token_ids, each, LONG if token_ids == PROMPTS[-1] else MIDDLE)
    return got


@pytest.mark.parametrize(
    ("role", "with_signal"),
    [
        pytest.param("prefill", signal.SIGSTOP, marks=pytest.mark.ci),
        ("generate", signal.SIGKILL),
        pytest.param("generate", signal.SIGABRT, marks=pytest.mark.ci),
    ],
)
def test_a_stream_survives_a_lost_worker(
    one_host: ServedCluster, client: Client, role: str, with_signal: signal.Signals
) -> None:
    num_told, victims = len(one_host.stderr), list[int]()
    for seed in itertools.count(with_signal):
        # of which no prefix is cached
        prompts = [prompt(3000 + each, seed=seed) for each in range(NUM_SLOTS)]
        victims = [listener(group.endpoints[-1]) for group in client.cluster_state().groups if group.role == role]
        streams = [client.generate(token_ids=each, params=LONG) for each in prompts]
        if role == "generate":
            next(streams[0])
        else:
            until(lambda: num_jobs(endpoints(client.cluster_state(), role)[-1], secret_of(one_host.cache)) > 0)
        for victim in victims:
            os.kill(victim, with_signal)
        with ThreadPoolExecutor(len(streams)) as pool:
            got = list(pool.map(Stream.collect, streams))
        for token_ids, each in zip(prompts, got, strict=True):
            check_answer(one_host, token_ids, each, LONG)
        if any(each.num_resumes or (each.usage is not None and each.usage.num_attempts >= 2) for each in got):
            break
        until_settled(one_host, client)  # this process was held up, and all streams ended before it struck: once more
    until_settled(one_host, client)
    assert not any(process_start(victim) for victim in victims)
    told = rf"^{role}-0\S* ended with \w+(: replacing it|, \d+ times in a row: )"
    until(lambda: bool(re.search(told, one_host.stderr[num_told:], re.MULTILINE)))
    crashed = rf"^{role}-0\S* crashed while it computed \d+ new requests"
    if with_signal == signal.SIGABRT:
        until(lambda: bool(re.search(crashed, one_host.stderr[num_told:], re.MULTILINE)))
    else:
        assert not re.search(crashed, one_host.stderr[num_told:], re.MULTILINE)


@pytest.mark.ci
@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_survive_a_lost_supervisor(
    one_host: ServedCluster, client: Client, with_signal: signal.Signals
) -> None:
    workers = endpoints(client.cluster_state(), "prefill")
    victim = supervisor(one_host.ray_folder)
    streams = _running(client)
    os.kill(victim, with_signal)
    _collect(one_host, streams)
    until(lambda: bool(supervisors(one_host.ray_folder) - {victim}))
    until_settled(one_host, client)
    assert not process_start(victim)
    assert endpoints(client.cluster_state(), "prefill") == workers


@pytest.mark.ci
def test_streams_survive_a_lost_orchestrator(one_host: ServedCluster, client: Client) -> None:
    workers = endpoints(client.cluster_state(), "prefill")
    victim = listener(one_host.target)
    streams = _running(client)
    os.kill(victim, signal.SIGKILL)
    *short, _ = _collect(one_host, streams)
    for each in short:  # they ran on meanwhile, perhaps to their ends: nothing was prefilled again
        assert each.num_resumes
        assert each.timings is not None and each.timings.prefill.ranks == ()
    until_settled(one_host, client)
    assert listener(one_host.target) != victim
    assert not process_start(victim)
    assert endpoints(client.cluster_state(), "prefill") == workers


@pytest.mark.nightly
def test_streams_survive_supervisor_and_orchestrator_lost_at_once(one_host: ServedCluster) -> None:
    with Client(one_host.target, reconnect=Reconnect(num_resumes=30)) as client:
        streams = _running(client)
        victims = (listener(one_host.target), supervisor(one_host.ray_folder))
        for victim, with_signal in zip(victims, (signal.SIGKILL, signal.SIGSTOP), strict=True):
            os.kill(victim, with_signal)
        _collect(one_host, streams)
        until_settled(one_host, client)
        assert not any(process_start(victim) for victim in victims)

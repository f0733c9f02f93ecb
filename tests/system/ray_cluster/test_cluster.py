"""A cluster on Ray, as users bring it up: bounds that hold, what operators ask of it, and lost processes, killed or
stopped, that are replaced while streams run and end as if nothing had been.

One cluster serves all of these tests, each of which leaves it idle and whole.
"""

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai import OpenAI

from baton import Client
from baton.calls.resume import Reconnect
from baton.calls.streams import Stream
from baton.errors import BatonError, DeadlineExceededError, ResourceExhaustedError
from baton.results.completion import Completion
from baton.sampling_params import SamplingParams
from baton.v1.planning_pb2 import GetStepTimesRequest
from baton.v1.planning_pb2_grpc import PlanningStub
from deploy.commands.keyed_channel import keyed
from deploy.commands.record import process_start
from modeling.checkpoints.weights import load_decoder
from planning import step_times
from planning.calibration import load
from planning.step_times import StepTimes
from tests.support.clusters.listening import descendants, listeners
from tests.support.clusters.ray_clusters import (
    ServedCluster,
    endpoints,
    listener,
    num_jobs,
    processes_of,
    secret_of,
    served,
    supervisor,
    supervisors,
    until,
    until_settled,
)
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = pytest.mark.cluster

SHORT = SamplingParams(max_tokens=16, ignore_eos=True)
MIDDLE = SamplingParams(max_tokens=120, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)
CORE = max(os.sched_getaffinity(0))
NUM_SLOTS, NUM_QUEUED = 4, 12
SETTINGS = (
    *(f"generate.num_slots={NUM_SLOTS}", f"orchestrator.max_queued_requests={NUM_QUEUED}"),
    *(f"orchestrator.cores=[{CORE}]", "orchestrator.lease_ttl_s=45"),
    *("supervision.heartbeat_s=0.5", "supervision.dead_after_s=8"),
    *("orchestrator.report_wait_s=10", "prefill.watchdog_floor_s=10"),
    *("generate.speculation=auto", "generate.draft_tokens=2", "http.port=0"),
)
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


def test_all_that_listens_is_reached_from_this_machine_alone(cluster: ServedCluster) -> None:
    found = listeners(descendants(cluster.process.pid) | processes_of(cluster.ray_folder).keys())
    commands = " ".join(each.command for each in found)
    assert all(part in commands for part in ("gcs_server", "raylet", "SupervisorActor", "WorkerActor")), commands
    assert [each for each in found if not each.is_local] == []


def _ask(client: Client, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    completion = client.generate(token_ids=prompt, params=params).collect()
    return [token.token_id for token in completion.tokens]


def test_beyond_the_queue_a_request_is_refused_at_once_and_told_when_to_come_back(
    cluster: ServedCluster, client: Client, smollm2: Path
) -> None:
    prompt = passage_ids(smollm2, 20)
    taken = [client.generate(token_ids=prompt, params=LONG) for _ in range(NUM_SLOTS + NUM_QUEUED)]
    until(lambda: client.cluster_state().num_queued == NUM_QUEUED)
    with pytest.raises(ResourceExhaustedError, match=f"the queue holds {NUM_QUEUED}") as refused:
        _ask(client, prompt, SHORT)
    assert refused.value.retry_after_s
    for stream in taken:
        stream.cancel()
    until_settled(cluster, client)


@pytest.mark.parametrize("num_tokens", [20, 2500], ids=["while tokens come", "during prefill"])
def test_a_client_that_leaves_frees_everything(
    cluster: ServedCluster, client: Client, smollm2: Path, num_tokens: int
) -> None:
    stream = client.generate(token_ids=passage_ids(smollm2, num_tokens), params=LONG)
    if num_tokens == 20:
        next(stream)
    else:
        until(lambda: num_jobs(endpoints(client.cluster_state(), "prefill")[0], secret_of(cluster.cache)) > 0)
    stream.cancel()
    until_settled(cluster, client, within_s=30)


def test_a_deadline_brings_usage_as_the_last_message(cluster: ServedCluster, client: Client, smollm2: Path) -> None:
    num_tries = 0
    while True:  # a client listens for a second more, whatever has come by then
        stream = client.generate(token_ids=passage_ids(smollm2, 20), params=ENDLESS, deadline_s=4)
        with pytest.raises(DeadlineExceededError):
            stream.collect()
        num_tries += 1
        if (stream.usage is not None and stream.output.tokens) or num_tries == 3:
            break
    assert stream.usage is not None
    assert stream.usage.num_output_tokens == len(stream.output.tokens) > 0
    until_settled(cluster, client)


def test_the_orchestrator_stays_on_its_cores(cluster: ServedCluster) -> None:
    threads = Path(f"/proc/{listener(cluster.target)}/task").iterdir()
    assert {core for thread in threads for core in os.sched_getaffinity(int(thread.name))} == {CORE}


def test_status_shows_the_groups(cluster: ServedCluster) -> None:
    shown = cluster.command("status")
    assert shown.returncode == 0
    assert {"prefill-0", "generate-0"} <= set(shown.stdout.split())


def test_a_streams_drafts_are_shown_at_its_end_and_by_status(cluster: ServedCluster) -> None:
    shown = cluster.command("generate", "--target", cluster.target, "--max-tokens", "24", "--ignore-eos", "One, two,")
    assert shown.returncode == 0, shown.stderr
    told = r"24 output tokens; .*; \d+ steps, drafts accepted: \w+ \d+ of \d+ \(\d+%; \d\.\d a round\)"
    assert re.search(told, shown.stderr)
    told = r"^generate-0: drafts accepted so far: .*streaming \d+ of \d+ .*; latest round: "
    until(lambda: bool(re.search(told, cluster.command("status").stdout, re.MULTILINE)))


@pytest.mark.ci
def test_a_calibration_counts_at_once_and_in_the_orchestrators_next_life(
    cluster: ServedCluster, client: Client, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.json"
    assert "nominal rates" in cluster.command("status").stdout
    lengths = ("--lengths", "16,64,256", "--checks", "128", "--repeats", "1", "--output", str(copy))
    calibrated = cluster.command("calibrate", *lengths)
    assert calibrated.returncode == 0, calibrated.stderr
    assert calibrated.stdout == "" and "the cluster predicts by it from now on" in calibrated.stderr
    measured = load(copy)
    assert {64, 256} <= {row.tokens + row.before for row in measured.rank_rows if row.is_last} <= {16, 64, 256}
    in_use = f"calibration {measured.fingerprint}: measured"
    assert in_use in cluster.command("status").stdout
    os.kill(listener(cluster.target), signal.SIGKILL)
    until_settled(cluster, client)
    assert in_use in cluster.command("status").stdout
    simulated = cluster.command("simulate", "--calibration", str(copy), "--ranks", "2", "--contexts", "256")
    assert simulated.returncode == 0, simulated.stderr


@pytest.mark.ci
def test_step_times_count_at_once_and_in_the_orchestrators_next_life(
    cluster: ServedCluster, client: Client, tmp_path: Path
) -> None:
    copy = tmp_path / "steps.json"
    options = ("--generate", "--batches", "2,1", "--contexts", "64,128", "--repeats", "1", "--output", str(copy))
    calibrated = cluster.command("calibrate", *options)
    assert calibrated.returncode == 0, calibrated.stderr
    assert calibrated.stdout == "" and "the cluster predicts by it from now on" in calibrated.stderr
    measured = step_times.load(copy)
    assert (measured.batches, measured.contexts, measured.is_measured) == ((1, 2), (64, 128), True)
    assert "rounds: steps that draft, and the one that verifies" in calibrated.stderr
    assert _steps_in_use(cluster) == measured
    os.kill(listener(cluster.target), signal.SIGKILL)
    until_settled(cluster, client)
    assert _steps_in_use(cluster) == measured
    refused = cluster.command("calibrate", "--generate", "--batches", "5")
    assert refused.returncode == 2
    assert refused.stderr == "baton: --batches: '5' is out of range: use whole numbers from 1 to 4\n"


def _steps_in_use(cluster: ServedCluster) -> StepTimes:
    with keyed(grpc.insecure_channel(cluster.target), None, secret_of(cluster.cache)) as channel:
        reply = PlanningStub(channel).GetStepTimes(GetStepTimesRequest(), timeout=30)
    return step_times.loads(reply.step_times, "cluster")


@pytest.mark.ci
def test_a_drained_group_stays_so_in_the_orchestrators_next_life_and_metrics_where_they_were(
    cluster: ServedCluster, client: Client, smollm2: Path
) -> None:
    metrics = client.cluster_state().metrics_endpoint
    drained = cluster.command("drain", "prefill-0", "--keep")
    assert (drained.returncode, drained.stdout) == (0, "prefill-0 is drained: it has nothing left to do\n")
    assert "prefill-0 drained" in " ".join(cluster.command("status").stdout.split())
    os.kill(listener(cluster.target), signal.SIGKILL)
    until(lambda: _is_drained(client))
    assert len(_ask(client, passage_ids(smollm2, 300), SHORT)) == SHORT.max_tokens
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    assert 'baton_group_drained{group="prefill-0",role="prefill"} 1.0' in text
    assert 'baton_disagg_decisions_total{reason="no_prefill_groups"} 1.0' in text
    assert cluster.command("drain", "prefill-0", "--undo").returncode == 0
    until_settled(cluster, client)


def _is_drained(client: Client) -> bool:
    try:
        groups = client.cluster_state().groups
    except BatonError:
        return False  # no orchestrator yet
    return [group.name for group in groups if group.is_drained] == ["prefill-0"]


def test_openais_api_is_served_and_comes_back_when_its_process_ends(cluster: ServedCluster, client: Client) -> None:
    until(lambda: "OpenAI's API over HTTP: " in cluster.stderr)
    found = re.search(r"OpenAI's API over HTTP: (\S+)/v1", cluster.stderr)
    assert found and f"OpenAI's API on {found[1]}/v1" in cluster.command("status").stdout
    with OpenAI(base_url=f"{found[1]}/v1", api_key="any", max_retries=0, timeout=60) as openai:
        (model,) = openai.models.list()
        asked: dict[str, Any] = {"model": model.id, "prompt": "Once upon", "max_tokens": 8, "temperature": 0}
        expected = client.generate("Once upon", max_tokens=8).collect().text
        assert openai.completions.create(**asked).choices[0].text == expected
        answer = openai.responses.create(model=model.id, input="Why is the sky blue?", max_output_tokens=4)
        assert answer.status == "incomplete" and answer.usage is not None and answer.usage.output_tokens == 4
        again = openai.responses.create(
            model=model.id, input="Why?", previous_response_id=answer.id, max_output_tokens=4
        )
        assert again.usage is not None and again.usage.input_tokens > answer.usage.input_tokens
        os.kill(_http_process(cluster), signal.SIGKILL)
        until(lambda: "the HTTP gateway has ended (status -9)" in cluster.stderr)
        assert openai.completions.create(**asked).choices[0].text == expected  # the launcher keeps the address
    until_settled(cluster, client)


def _http_process(cluster: ServedCluster) -> int:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(cluster.process.pid)}
    (found,) = (pid for pid, command in commands.items() if b"deploy.front_doors.http_process" in command)
    return found


def test_a_busy_cluster_is_not_calibrated(cluster: ServedCluster, client: Client, smollm2: Path) -> None:
    stream = client.generate(token_ids=passage_ids(smollm2, 20), params=LONG)
    next(stream)
    refused = cluster.command("calibrate")
    assert refused.returncode == 1
    assert refused.stderr.startswith("baton: the cluster serves 1 requests, which would disturb the measurement")
    stream.cancel()
    until_settled(cluster, client)


def test_a_second_cluster_of_the_same_name_is_refused(cluster: ServedCluster, smollm2: Path) -> None:
    refused = cluster.command("serve", "--set", f"model.name={smollm2}")
    assert refused.returncode == 2
    assert refused.stderr.startswith("baton: cluster baton is running")
    assert len(refused.stderr.splitlines()) == 1


# What is lost is replaced.


@pytest.fixture(scope="module")
def answers(cluster: ServedCluster, smollm2: Path) -> Answers:
    """Prompts, three short and the last long, and what an undisturbed stream brings for each."""
    prompts = [passage_ids(smollm2, 30 + 50 * index, start=200 * index) for index in range(3)]
    prompts.append(passage_ids(smollm2, 900))
    with Client(cluster.target) as client, ThreadPoolExecutor(len(prompts)) as pool:
        whole = pool.map(lambda prompt: client.generate(token_ids=prompt, params=MIDDLE).collect(), prompts)
        return {prompt: _content(each) for prompt, each in zip(prompts, whole, strict=True)}


def _running(client: Client, answers: Answers) -> list[Stream]:
    """A stream for each prompt: the short ones' tokens come, the long one is being prefilled."""
    *short, long = answers
    streams = [client.generate(token_ids=prompt, params=MIDDLE) for prompt in short]
    for stream in streams:
        next(stream)
    streams.append(client.generate(token_ids=long, params=MIDDLE))
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


@pytest.mark.ci
def test_sixteen_concurrent_streams_equal_one_process(cluster: ServedCluster, client: Client, smollm2: Path) -> None:
    prompts = [passage_ids(smollm2, 20 + 9 * index, start=60 * index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda ids: client.generate(token_ids=ids, params=SHORT).collect(), prompts))
    decoder = load_decoder(smollm2, dtype="float32")
    for prompt, each in zip(prompts, got, strict=True):
        tokens, _ = _content(each)
        assert len(tokens) == SHORT.max_tokens
        check_equal_tokens(decoder, prompt, tokens, SHORT)
    until_settled(cluster, client)


@pytest.mark.parametrize(
    ("role", "with_signal"),
    [pytest.param("prefill", signal.SIGSTOP, marks=pytest.mark.ci), ("generate", signal.SIGKILL)],
)
def test_a_stream_survives_a_lost_worker(
    cluster: ServedCluster, client: Client, smollm2: Path, role: str, with_signal: signal.Signals
) -> None:
    num_tokens, start = (2000, 1000) if role == "prefill" else (900, 4000)
    prompt = passage_ids(smollm2, num_tokens, start=start)  # of which no prefix is cached
    num_told = len(cluster.stderr)
    victim = listener(endpoints(client.cluster_state(), role)[-1])
    stream = client.generate(token_ids=prompt, params=MIDDLE)
    if role == "generate":
        next(stream)
    else:
        until(lambda: num_jobs(endpoints(client.cluster_state(), role)[-1], secret_of(cluster.cache)) > 0)
    os.kill(victim, with_signal)
    got = stream.collect()
    tokens, _ = _content(got)
    assert len(tokens) == MIDDLE.max_tokens
    check_equal_tokens(load_decoder(smollm2, dtype="float32"), prompt, tokens, MIDDLE)
    assert got.usage is not None
    assert got.usage.num_attempts >= 2
    until_settled(cluster, client)
    assert not process_start(victim)
    told = rf"^{role}-0\S* ended with \w+(: replacing it|, 2 times in a row: )"
    until(lambda: bool(re.search(told, cluster.stderr[num_told:], re.MULTILINE)))


@pytest.mark.ci
@pytest.mark.parametrize("with_signal", LOSSES)
def test_streams_survive_a_lost_supervisor(
    cluster: ServedCluster, client: Client, answers: Answers, with_signal: signal.Signals
) -> None:
    workers = endpoints(client.cluster_state(), "prefill")
    victim = supervisor(cluster.ray_folder)
    streams = _running(client, answers)
    os.kill(victim, with_signal)
    _collect(streams, answers)
    until(lambda: bool(supervisors(cluster.ray_folder) - {victim}))
    until_settled(cluster, client)
    assert not process_start(victim)
    assert endpoints(client.cluster_state(), "prefill") == workers


@pytest.mark.ci
@pytest.mark.parametrize("with_signal", LOSS_PARAMS)
def test_streams_survive_a_lost_orchestrator(
    cluster: ServedCluster, client: Client, answers: Answers, with_signal: signal.Signals
) -> None:
    workers = endpoints(client.cluster_state(), "prefill")
    victim = listener(cluster.target)
    streams = _running(client, answers)
    os.kill(victim, with_signal)
    *short, _ = _collect(streams, answers)
    for each in short:  # they ran on meanwhile, perhaps to their ends: nothing was prefilled again
        assert each.num_resumes
        assert each.timings is not None and each.timings.prefill.ranks == ()
    until_settled(cluster, client)
    assert listener(cluster.target) != victim
    assert not process_start(victim)
    assert endpoints(client.cluster_state(), "prefill") == workers


@pytest.mark.nightly
def test_streams_survive_supervisor_and_orchestrator_lost_at_once(cluster: ServedCluster, answers: Answers) -> None:
    with Client(cluster.target, reconnect=Reconnect(num_resumes=30)) as client:
        streams = _running(client, answers)
        victims = (listener(cluster.target), supervisor(cluster.ray_folder))
        for victim, with_signal in zip(victims, LOSSES, strict=True):
            os.kill(victim, with_signal)
        _collect(streams, answers)
        until_settled(cluster, client)
        assert not any(process_start(victim) for victim in victims)

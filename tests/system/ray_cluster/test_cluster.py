"""A cluster on Ray, as users bring it up: exact tokens, bounds that hold, and gone without a trace."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton import Client
from baton.errors import BatonError, DeadlineExceededError, ResourceExhaustedError
from baton.sampling_params import SamplingParams
from baton.v1.planning_pb2 import GetStepTimesRequest
from baton.v1.planning_pb2_grpc import PlanningStub
from planning import step_times
from planning.calibration import load
from planning.step_times import StepTimes
from tests.support.clusters.ray_clusters import (
    ServedCluster,
    endpoints,
    launched,
    listener,
    num_jobs,
    processes_of,
    recorded_folder,
    served,
    shared_files,
    until,
    until_settled,
)
from tests.support.models.texts import passage_ids

SHORT = SamplingParams(max_tokens=16, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
CORE = max(os.sched_getaffinity(0))
SETTINGS = ("generate.num_slots=4", "orchestrator.max_queued_requests=4", f"orchestrator.cores=[{CORE}]")


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with served(tmp_path_factory.mktemp("cache"), smollm2, *SETTINGS) as running:
        yield running


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[Client]:
    with Client(cluster.target) as made:
        yield made


def _ask(client: Client, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    completion = client.generate(token_ids=prompt, params=params).collect()
    return [token.token_id for token in completion.tokens]


def test_beyond_the_queue_a_request_is_refused_at_once_and_told_when_to_come_back(
    client: Client, smollm2: Path
) -> None:
    prompt = passage_ids(smollm2, 20)
    taken = [client.generate(token_ids=prompt, params=LONG) for _ in range(8)]
    until(lambda: client.cluster_state().num_queued == 4)
    with pytest.raises(ResourceExhaustedError, match="the queue holds 4") as refused:
        _ask(client, prompt, SHORT)
    assert refused.value.retry_after_s
    for stream in taken:
        stream.cancel()
    until_settled(client)


@pytest.mark.parametrize("num_tokens", [20, 2500], ids=["while tokens come", "during prefill"])
def test_a_client_that_leaves_frees_everything(client: Client, smollm2: Path, num_tokens: int) -> None:
    stream = client.generate(token_ids=passage_ids(smollm2, num_tokens), params=LONG)
    if num_tokens == 20:
        next(stream)
    else:
        until(lambda: num_jobs(endpoints(client.cluster_state(), "prefill")[0]) > 0)
    stream.cancel()
    until_settled(client, within_s=5)


def test_a_deadline_brings_usage_as_the_last_message(client: Client, smollm2: Path) -> None:
    stream = client.generate(token_ids=passage_ids(smollm2, 20), params=LONG, deadline_s=3)
    with pytest.raises(DeadlineExceededError):
        stream.collect()
    assert stream.usage is not None
    assert stream.usage.num_output_tokens == len(stream.output.tokens) > 0
    until_settled(client)


def test_the_orchestrator_stays_on_its_cores(cluster: ServedCluster) -> None:
    threads = Path(f"/proc/{listener(cluster.target)}/task").iterdir()
    assert {core for thread in threads for core in os.sched_getaffinity(int(thread.name))} == {CORE}


def test_status_shows_the_groups(cluster: ServedCluster) -> None:
    shown = cluster.command("status")
    assert shown.returncode == 0
    assert {"prefill-0", "generate-0"} <= set(shown.stdout.split())


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
    until_settled(client)
    assert in_use in cluster.command("status").stdout
    simulated = cluster.command("simulate", "--calibration", str(copy), "--ranks", "2", "--contexts", "256")
    assert simulated.returncode == 0, simulated.stderr


@pytest.mark.ci
def test_step_times_count_at_once_and_in_the_orchestrators_next_life(
    cluster: ServedCluster, client: Client, tmp_path: Path
) -> None:
    copy = tmp_path / "steps.json"
    options = ("--generate", "--batches", "4,1", "--contexts", "64,256", "--repeats", "1", "--output", str(copy))
    calibrated = cluster.command("calibrate", *options)
    assert calibrated.returncode == 0, calibrated.stderr
    assert calibrated.stdout == "" and "the cluster predicts by it from now on" in calibrated.stderr
    measured = step_times.load(copy)
    assert (measured.batches, measured.contexts, measured.is_measured) == ((1, 4), (64, 256), True)
    assert _steps_in_use(cluster) == measured
    os.kill(listener(cluster.target), signal.SIGKILL)
    until_settled(client)
    assert _steps_in_use(cluster) == measured
    refused = cluster.command("calibrate", "--generate", "--batches", "5")
    assert refused.returncode == 2
    assert refused.stderr == "baton: --batches: '5' is out of range: use whole numbers from 1 to 4\n"


def _steps_in_use(cluster: ServedCluster) -> StepTimes:
    with grpc.insecure_channel(cluster.target) as channel:
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
    until_settled(client)


def _is_drained(client: Client) -> bool:
    try:
        groups = client.cluster_state().groups
    except BatonError:
        return False  # no orchestrator yet
    return [group.name for group in groups if group.is_drained] == ["prefill-0"]


def test_a_busy_cluster_is_not_calibrated(cluster: ServedCluster, client: Client, smollm2: Path) -> None:
    stream = client.generate(token_ids=passage_ids(smollm2, 20), params=LONG)
    next(stream)
    refused = cluster.command("calibrate")
    assert refused.returncode == 1
    assert refused.stderr.startswith("baton: the cluster serves 1 requests, which would disturb the measurement")
    stream.cancel()
    until_settled(client)


def test_a_second_cluster_of_the_same_name_is_refused(cluster: ServedCluster, smollm2: Path) -> None:
    refused = cluster.command("serve", "--set", f"model.name={smollm2}")
    assert refused.returncode == 2
    assert refused.stderr.startswith("baton: cluster baton is running")
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.ci
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("interrupt", marks=pytest.mark.soak),
        "stop",
        "kill the launcher, then stop",
    ],
)
def test_nothing_is_left(smollm2: Path, tmp_path: Path, how: str) -> None:
    with served(tmp_path, smollm2, "prefill.num_ranks=1") as running:
        assert processes_of(running.ray_folder)
        assert shared_files(tmp_path)
        if how == "interrupt":
            running.interrupt()
            assert running.process.wait(60) == 0
        else:
            if how.startswith("kill"):
                running.process.kill()
                running.process.wait()
            stopped = running.command("stop")
            assert stopped.returncode == 0, stopped.stderr
    assert not processes_of(running.ray_folder)
    assert not Path(running.ray_folder).exists()
    assert not shared_files(tmp_path)
    assert not list((tmp_path / "baton" / "clusters").iterdir())


@pytest.mark.ci
@pytest.mark.parametrize("line", ["starting Ray", "starting 2 workers"])
def test_an_interrupted_start_leaves_nothing(smollm2: Path, tmp_path: Path, line: str) -> None:
    with launched(tmp_path, smollm2, "prefill.num_ranks=1") as starting:
        until(lambda: line in starting.stderr)
        folder = recorded_folder(tmp_path)
        until(lambda: bool(processes_of(folder)))
        starting.interrupt()
        assert starting.process.wait(60) == 0
    assert starting.stderr.splitlines()[-1] == "cluster baton is gone"
    assert not processes_of(folder)
    assert not Path(folder).exists()
    assert not list((tmp_path / "baton" / "clusters").iterdir())

"""A cluster whose pools nobody has configured: its machine decides, says so and what its start took, and serves the
model's tokens."""

import os
import re
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.ray_clusters import processes_of, served, until
from tests.support.models.reference import check_equal_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PROMPT = tuple(range(100, 140))
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
UP = r"^Ray is up, (\d+\.\d) s after the start$"
READY = r"^ready: .* \((\d+\.\d) s after the start, (\d+\.\d) s after Ray\)$"
ARRANGED = r"^arrangement for \d+ cores?: (one engine|a chain of (\d+) ranks?)"


def test_a_cluster_is_as_its_machine_is_arranged(smollm2: Path, tmp_path: Path) -> None:
    with served(tmp_path, smollm2, is_arranged=True) as running:
        arranged = re.search(ARRANGED, running.stderr, re.MULTILINE)
        assert arranged, running.stderr
        up, ready = re.search(UP, running.stderr, re.MULTILINE), re.search(READY, running.stderr, re.MULTILINE)
        assert up and ready, running.stderr
        assert abs(float(up[1]) + float(ready[2]) - float(ready[1])) < 1
        with Client(running.target) as client:
            num_ranks = int(arranged[2] or 0)
            until(lambda: sum(len(group.ranks) for group in client.cluster_state().groups) == num_ranks)
            events = list(client.generate(token_ids=PROMPT, params=PARAMS))
        workers = [pid for pid, command in processes_of(running.ray_folder).items() if "WorkerActor" in command]
        priorities = {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers}
    assert priorities == {os.getpriority(os.PRIO_PROCESS, 0)}, "Ray lowers its workers' by itself"
    token_ids = [event.token.token_id for event in events if event.token is not None]
    assert len(token_ids) == PARAMS.max_tokens
    check_equal_tokens(load_decoder(smollm2), PROMPT, token_ids, PARAMS)

"""A peer that is asked line by line: what is not an answer is passed over, an end is an error and no hang."""

import sys
from pathlib import Path

import pytest

from benchmarks.sides.vllm_peer import VllmPeer

pytestmark = pytest.mark.integration

PEER = """#!{python}
import json, os, sys
print("loading", flush=True)
print(json.dumps({{"ready": "1.0 " + os.environ["OMP_NUM_THREADS"]}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("end"):
        sys.exit(3)
    print("INFO: a step", flush=True)
    print(json.dumps({{"asked": asked, "set": os.environ["SETTING"], "arguments": sys.argv[2:]}}), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """What is run in the place of a Python that has vLLM."""
    path = tmp_path / "python"
    path.write_text(PEER.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_answers_come_one_by_one(python: Path) -> None:
    with VllmPeer.running(python, Path("model"), [0, 1], {"SETTING": "on"}) as peer:
        assert peer.version == "1.0 2"
        for steps in (1, 2):
            answer = peer.ask({"steps": steps})
            assert answer == {"asked": {"steps": steps}, "set": "on", "arguments": ["model", "--serve"]}


def test_a_peer_that_ends_is_said(python: Path) -> None:
    with (
        VllmPeer.running(python, Path("model"), [0], {"SETTING": ""}) as peer,
        pytest.raises(RuntimeError, match="the peer ended, with 3"),
    ):
        peer.ask({"end": True})

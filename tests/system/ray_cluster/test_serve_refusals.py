"""Configurations that `baton serve` cannot run: it prints a one-line error and starts nothing."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters.on_ray.ray_clusters import run_baton

pytestmark = pytest.mark.cluster

CI = pytest.mark.ci


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


FIRST_STEPS = ("measuring the kernels on this processor", "measuring what a core of this processor reaches")
"""Steps of the first start of this user, in any test that makes it."""


def _refusal(cache: Path, *assignments: str) -> str:
    """The one line that it gives as its reason."""
    settings = ("http.port=-1", *assignments)  # another test may have port 8000
    refused = run_baton(cache, "serve", *(part for each in settings for part in ("--set", each)))
    assert refused.returncode in (1, 2)
    assert not refused.stdout
    assert not list(cache.rglob("clusters/*.json"))  # no cluster is recorded, so none is left
    *steps, reason = refused.stderr.splitlines()
    assert [step for step in steps if step not in FIRST_STEPS] in ([], ["joining Ray at 127.0.0.1:1"])
    return reason


@pytest.mark.parametrize(
    ("assignments", "text"),
    [
        (("prefill.num_groups=64", "prefill.num_ranks=64"), "baton: memory: "),
        pytest.param(("orchestrator.cores=[4096]",), "baton: cores: pinned to [4096], and there are ", marks=CI),
        pytest.param(("model.dtype=int3",), "baton: model.dtype = 'int3' is wrong: ", marks=CI),
        (("generate.device=cuda",), "baton: devices: generate.device = cuda is not available: "),
        (("ray.address=127.0.0.1:1",), "baton: Ray at 127.0.0.1:1 "),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(
    smollm2: Path, tmp_path: Path, assignments: tuple[str, ...], text: str
) -> None:
    assert _refusal(tmp_path, f"model.name={smollm2}", "orchestrator.port=0", *assignments).startswith(text)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path, "model.name=/absent").startswith("baton: model '/absent' is neither a folder nor")


@CI
def test_a_port_in_use_is_refused(smollm2: Path, tmp_path: Path, taken_port: int) -> None:
    text = f"baton: port: 127.0.0.1:{taken_port} cannot be listened on (Address already in use): set orchestrator.host"
    assert _refusal(tmp_path, f"model.name={smollm2}", f"orchestrator.port={taken_port}").startswith(text)


def test_the_port_of_http_in_use_is_refused(smollm2: Path, tmp_path: Path, taken_port: int) -> None:
    text = f"baton: port: 127.0.0.1:{taken_port} cannot be listened on (Address already in use): set http.host and"
    settings = (f"model.name={smollm2}", "orchestrator.port=0", f"http.port={taken_port}")
    assert _refusal(tmp_path, *settings).startswith(text)

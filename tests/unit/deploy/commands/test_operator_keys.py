"""Commands of operators and the keys that they send: a cluster with such keys obeys no command without one."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.commands.cluster_secrets import keep_secrets
from deploy.commands.record import ClusterRecord, process_start, record_path
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

TENANTS = Tenants(
    (Tenant("acme", key_hashes=(hash_key("acme-key"),)),), require_key=True, operator_hashes=(hash_key("operator-key"),)
)


@pytest.fixture
async def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BareCluster]:
    """Named mine, on this machine, with keys in the environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OPERATOR_KEY", "operator-key")
    monkeypatch.setenv("ACME_KEY", "acme-key")
    async with cluster(num_ranks=1, num_groups=2, config=OrchestratorConfig(tenants=TENANTS)) as made:
        pid, target = os.getpid(), f"{HOST}:{made.server.port}"
        ClusterRecord("mine", pid, process_start(pid), f"{HOST}:1", "", target).save()
        keep_secrets(record_path("mine"), SECRET)
        yield made


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(main, list(arguments))


async def test_a_drain_needs_an_operators_key(guarded: BareCluster, capsys: pytest.CaptureFixture[str]) -> None:
    drain = ("drain", "group-0", "mine", "--keep")
    assert await run(*drain) == 1
    assert "Drain is for operators: send an operator's key" in capsys.readouterr().err
    assert await run(*drain, "--api-key-env", "ACME_KEY") == 1
    assert "the API key is tenant acme's: use an operator's key" in capsys.readouterr().err
    assert not guarded.members.orders.drained
    assert await run(*drain, "--api-key-env", "OPERATOR_KEY") == 0
    assert guarded.members.orders.drained == {"group-0"}
    assert await run("drain", "group-0", "mine", "--undo", "--api-key-env", "OPERATOR_KEY") == 0
    assert not guarded.members.orders.drained


async def test_a_reload_asks_with_its_key(guarded: BareCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("reload", "mine") == 1
    assert "the call has no API key" in capsys.readouterr().err
    assert await run("reload", "mine", "--group", "no-such", "--api-key-env", "OPERATOR_KEY") == 1
    said = capsys.readouterr().err
    assert "no-such" in said and "baton reload mine --api-key-env OPERATOR_KEY --group no-such" in said


async def test_status_asks_with_its_key(guarded: BareCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("status", "mine") == 1
    assert "does not answer (UNAUTHENTICATED; give a key by --api-key-env)" in capsys.readouterr().out
    assert await run("status", "mine", "--api-key-env", "ACME_KEY") == 0
    assert "group-0" in capsys.readouterr().out


async def test_calibrate_asks_with_its_key(guarded: BareCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("calibrate", "mine") == 1
    assert "the call has no API key" in capsys.readouterr().err
    assert await run("calibrate", "mine", "--lengths", "20", "--api-key-env", "OPERATOR_KEY") == 2
    assert "--lengths 20: one length tells no costs apart" in capsys.readouterr().err  # it was let in


async def test_a_variable_that_is_not_set_is_named(guarded: BareCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("drain", "group-0", "mine", "--api-key-env", "NO_SUCH_KEY") == 2
    assert "environment variable NO_SUCH_KEY is not set: export it" in capsys.readouterr().err

"""Commands of operators and the keys that they send: a cluster with such keys obeys no command without one."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.commands.cluster_secrets import keep_secrets
from deploy.commands.record import ClusterRecord, process_start, record_path
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.wire.commands import Baton
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

TENANTS = Tenants(
    (Tenant("acme", key_hashes=(hash_key("acme-key"),)),), require_key=True, operator_hashes=(hash_key("operator-key"),)
)


@pytest.fixture
async def guarded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BareCluster]:
    """A cluster named mine, on this machine, with keys in the environment."""
    monkeypatch.setenv("OPERATOR_KEY", "operator-key")
    monkeypatch.setenv("ACME_KEY", "acme-key")
    async with cluster(num_ranks=1, num_groups=2, config=OrchestratorConfig(tenants=TENANTS)) as made:
        made.metadata = (("authorization", "Bearer operator-key"),)
        pid, target = os.getpid(), f"{HOST}:{made.server.port}"
        ClusterRecord("mine", pid, process_start(pid), f"{HOST}:1", "", target).save()
        keep_secrets(record_path("mine"), SECRET)
        yield made


async def test_a_drain_needs_an_operators_key(guarded: BareCluster, baton: Baton) -> None:
    drain = "drain group-0 mine --keep"
    for key, refusal in (
        ("", "Drain is for operators: send an operator's key"),
        ("--api-key-env ACME_KEY", "the API key is tenant acme's: use an operator's key"),
    ):
        run = await baton.run_beside(f"{drain} {key}")
        assert run.status == 1 and refusal in run.err
    assert not guarded.members.orders.drained
    assert (await baton.run_beside(f"{drain} --api-key-env OPERATOR_KEY")).status == 0
    assert guarded.members.orders.drained == {"group-0"}
    assert (await baton.run_beside("drain group-0 mine --undo --api-key-env OPERATOR_KEY")).status == 0
    assert not guarded.members.orders.drained


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("command", "status", "shown"),
    [
        ("reload mine", 1, "the call has no API key"),
        (
            "reload mine --group no-such --api-key-env OPERATOR_KEY",
            1,
            "baton reload mine --api-key-env OPERATOR_KEY --group no-such",
        ),
        ("status mine", 1, "does not answer (UNAUTHENTICATED; give a key by --api-key-env)"),
        ("status mine --api-key-env ACME_KEY", 0, "group-0"),
        ("drain group-0 mine --api-key-env NO_SUCH_KEY", 2, "environment variable NO_SUCH_KEY is not set: export it"),
    ],
)
async def test_commands_ask_with_the_key_that_they_are_given(
    baton: Baton, command: str, status: int, shown: str
) -> None:
    run = await baton.run_beside(command)
    assert run.status == status and shown in run.out + run.err

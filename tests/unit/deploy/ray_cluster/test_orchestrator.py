"""What a user configured is what the orchestrator goes by."""

from pathlib import Path

from deploy.config.file import load_config
from orchestrator.requests.tenants import Tenant, hash_key


def test_bounds_and_tenants_reach_the_orchestrator() -> None:
    key = f"sha256:{hash_key('k-1')}"
    assignments = [
        "orchestrator.max_queued_requests=7",
        "orchestrator.trust_tenant_metadata=true",
        "orchestrator.tenants.acme.max_running=3",
        f'orchestrator.tenants.keyed.api_keys=["{key}"]',
    ]
    limits = load_config(None, assignments).orchestrator_config(Path("model"))
    assert limits.max_queued_requests == 7
    assert limits.tenants.of((("baton-tenant", "acme"),)) == Tenant("acme", max_running=3)
    assert limits.tenants.of((("x-api-key", "k-1"),)).name == "keyed"


def test_operators_keys_and_folders_of_models_reach_the_orchestrator() -> None:
    assignments = [f'orchestrator.operator_keys=["sha256:{hash_key("o-1")}"]', "model.cache=/cache"]
    limits = load_config(None, assignments).orchestrator_config(Path("/models/one"))
    assert limits.tenants.is_operator((("x-api-key", "o-1"),))
    assert limits.model_folders == (Path("/models"), Path("/cache"))

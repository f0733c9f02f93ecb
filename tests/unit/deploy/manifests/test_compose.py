"""The Compose file: of the specification's schema, with services that find each other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import MANIFESTS, documents

pytestmark = pytest.mark.integration

pytest.importorskip("check_jsonschema")

PATH = MANIFESTS / "compose.yaml"


def test_the_file_is_of_the_compose_specifications_schema(tmp_path: Path) -> None:
    assert complaints(PATH) == ""
    broken = tmp_path / "compose.yaml"
    broken.write_text(PATH.read_text().replace("restart: unless-stopped", "restarts: unless-stopped"))
    assert "restarts" in complaints(broken)


def test_services_refer_to_services_secrets_and_configurations_that_there_are() -> None:
    (compose,) = documents(PATH)
    services: dict[str, Any] = compose["services"]
    assert set(services) == {"head", "prefill", "generate", "gateway"}
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        assert set(service["secrets"]) <= set(compose["secrets"])
        assert {each["source"] for each in service.get("configs", ())} <= set(compose["configs"])
    assert (MANIFESTS / compose["configs"]["cluster"]["file"]).is_file()
    build = services["head"]["build"]
    assert (PATH.parent / build["context"] / build["dockerfile"]).resolve() == MANIFESTS / "Dockerfile"


def test_only_the_gateway_is_reached_from_outside() -> None:
    (compose,) = documents(PATH)
    assert [name for name, service in compose["services"].items() if "ports" in service] == ["gateway"]


def test_the_gateway_writes_to_no_volume_that_workers_read() -> None:
    (compose,) = documents(PATH)
    mounts = {name: service["volumes"] for name, service in compose["services"].items()}
    assert all(each.get("read_only") for each in mounts["gateway"])
    assert any(each["source"] == "cache" for each in mounts["generate"])


def complaints(path: Path) -> str:
    """What the schema's check says; empty when it passes. Merge keys are resolved first, as Compose does."""
    resolved = json.dumps(documents(path)[0])
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "-"]
    ran = subprocess.run(command, input=resolved, text=True, capture_output=True, timeout=60)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr

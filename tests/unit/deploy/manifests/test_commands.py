"""Commands in manifests are ones that `baton` and `ray` take, and the configuration is one that Baton reads."""

import json

import pytest

from deploy.cli import build_parser
from deploy.config.cluster import ClusterConfig
from deploy.config.file import load_config
from tests.support.manifests import MANIFESTS, commands, documents, pod_templates, ray_cluster


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    """The configuration of the manifests, with the keys that the environment gives."""
    monkeypatch.setenv("BATON_API_KEY", "a key of clients")
    monkeypatch.setenv("BATON_OPERATOR_KEY", "a key of operators")
    return load_config(MANIFESTS / "cluster.toml")


def test_every_command_of_baton_is_parsed() -> None:
    found = commands(program="baton")
    assert sorted({words[0] for words in found}) == ["gateway", "serve", "status", "stop"]
    for words in found:
        build_parser().parse_args(words)


def test_every_command_of_ray_is_parsed() -> None:
    from ray.scripts import scripts

    found = commands(program="ray")
    assert sorted({words[0] for words in found}) == ["health-check", "start", "stop"]
    for name, *words in found:
        command = scripts.cli.commands[name]
        command.make_context(name, list(words))


def test_a_command_is_found_behind_another() -> None:
    serving = [words for words in commands(program="baton") if words[0] == "serve"]
    assert [words for words in serving if "--address" not in words or "--config" not in words] == []
    assert len(serving) == 2  # the head of Compose, and that of Kubernetes


def test_the_configuration_asks_for_what_the_nodes_of_each_manifest_declare(config: ClusterConfig) -> None:
    wanted = {"baton_prefill": config.prefill.num_ranks, "baton_generate": 1}
    (machines,) = documents(MANIFESTS / "ray_cluster.yaml")
    (compose,) = documents(MANIFESTS / "compose.yaml")
    for role in ("prefill", "generate"):
        pool, size = f"baton_{role}", wanted[f"baton_{role}"]
        assert machines["available_node_types"][role]["resources"][pool] == size
        assert f'{{"{pool}": {size}}}' in compose["services"][role]["command"][-1]
        (group,) = [each for each in ray_cluster()["spec"]["workerGroupSpecs"] if each["groupName"] == role]
        declared = group["rayStartParams"]["resources"]  # JSON in a string of JSON, which a shell takes as one word
        assert json.loads(json.loads(declared)) == {pool: size}
        labels = config.node_labels[role]
        assert machines["available_node_types"][role]["labels"] == group["labels"] == labels
        ((key, value),) = labels.items()
        assert f"--labels={key}={value} " in compose["services"][role]["command"][-1]


def test_the_nodes_of_each_pool_have_the_cores_that_its_workers_compute_with(config: ClusterConfig) -> None:
    threads = {
        "prefill": config.prefill.num_ranks * config.prefill.num_threads,
        "generate": config.generate.num_threads,
    }
    (machines,) = documents(MANIFESTS / "ray_cluster.yaml")
    for role, cores in threads.items():
        assert machines["available_node_types"][role]["resources"]["CPU"] == cores
        (container,) = pod_templates()[role]["spec"]["containers"]
        assert int(container["resources"]["limits"]["cpu"]) == cores


def test_the_configuration_asks_for_keys_and_listens_where_probes_and_gateways_call(config: ClusterConfig) -> None:
    assert config.orchestrator.require_api_key and config.orchestrator.operator_keys
    assert [len(tenant.api_keys) for tenant in config.orchestrator.tenants.values()] == [1]
    section = config.orchestrator
    assert (section.host, section.port, section.metrics_port) == ("0.0.0.0", 50051, 9090)
    assert config.ray.node_wait_s > 0

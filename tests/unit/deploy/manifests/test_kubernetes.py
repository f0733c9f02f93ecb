"""What goes to Kubernetes: core objects by Kubernetes' own schemas, the RayCluster by what Ray reads of it."""

from typing import Any

import pytest

from deploy.ray_cluster.spawner import pool
from tests.support.manifests import MANIFESTS, documents, kubernetes_objects, pod_templates, ray_cluster

kubernetes_validate = pytest.importorskip("kubernetes_validate")

KUBERNETES = ("1.32", "1.35")
"""The oldest version that KubeRay's current operators are tested with, and a recent one."""
KUBERAY_FIELDS = {
    "spec": "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec"
    " headServiceAnnotations managedBy rayVersion suspend upgradeStrategy workerGroupSpecs",
    "headGroupSpec": "enableIngress headService labels rayStartParams resources serviceType template",
    "workerGroupSpecs": "groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts rayStartParams replicas"
    " resources scaleStrategy suspend template",
    "authOptions": "enableK8sTokenAuth mode secretName",
}
"""Fields of a RayCluster of ray.io/v1, as KubeRay's API reference lists them."""

core = [each for each in kubernetes_objects() if each["kind"] != "RayCluster"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("found", core, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_every_core_object_is_one_that_kubernetes_takes(found: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("name", pod_templates())
def test_every_pod_is_one_that_kubernetes_takes(name: str) -> None:
    kubernetes_validate.validate(as_pod(pod_templates()[name]), KUBERNETES[0], strict=True)


def test_a_field_that_no_pod_has_is_seen() -> None:
    pod = as_pod(pod_templates()["head"])
    pod["spec"]["containers"][0]["livenessProbes"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProbes"):
        kubernetes_validate.validate(pod, KUBERNETES[0], strict=True)


def test_the_ray_cluster_has_no_field_that_kuberay_does_not_know() -> None:
    found = ray_cluster()
    assert found["apiVersion"] == "ray.io/v1"
    spec = found["spec"]
    parts = [("spec", spec), ("headGroupSpec", spec["headGroupSpec"]), ("authOptions", spec["authOptions"])]
    parts += [("workerGroupSpecs", each) for each in spec["workerGroupSpecs"]]
    unknown = [(name, set(part) - set(KUBERAY_FIELDS[name].split())) for name, part in parts]
    assert [each for each in unknown if each[1]] == []
    for group in spec["workerGroupSpecs"]:
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_ray_reads_the_pools_resources_and_labels_from_the_ray_cluster() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    found = ray_cluster()
    found["metadata"]["namespace"] = "default"
    types = _derive_autoscaling_config_from_ray_cr(found)["available_node_types"]  # checked by Ray's own schema
    assert types["headgroup"]["resources"]["CPU"] == 0
    for role in ("prefill", "generate"):
        assert types[role]["resources"][pool(role)] >= 1
        assert types[role]["labels"] == {"baton-pool": role}
    assert pool("generate") not in types["prefill"]["resources"]


def test_ray_is_of_the_version_that_is_tested() -> None:
    import ray

    assert ray_cluster()["spec"]["rayVersion"] == ray.__version__


def test_every_name_that_a_pod_refers_to_is_made() -> None:
    (kustomization,) = documents(MANIFESTS / "kustomization.yaml")
    made = {each["name"] for kind in ("configMapGenerator", "secretGenerator") for each in kustomization[kind]}
    named = {name for template in pod_templates().values() for name in references(template)}
    assert named == made
    files = [name for each in kustomization["configMapGenerator"] for name in each["files"]]
    assert [name for name in files if not (MANIFESTS / name).is_file()] == []


def test_every_selector_selects_pods_that_there_are() -> None:
    labels = {name: template.get("metadata", {}).get("labels", {}) for name, template in pod_templates().items()}
    for group in ("head", "prefill", "generate"):  # these labels are KubeRay's
        kind = "head" if group == "head" else "worker"
        labels[group] = {"ray.io/cluster": "baton", "ray.io/node-type": kind, "ray.io/group": group}
    for found in core:
        spec = found["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        wanted = selector.get("matchLabels", selector).items()
        assert any(wanted <= each.items() for each in labels.values()), found["metadata"]


def test_who_serves_says_so_by_grpc_health_and_no_pod_may_be_root() -> None:
    templates = pod_templates()
    for name, port in (("head", 50051), ("baton-gateway", 50052)):
        assert templates[name]["spec"]["containers"][0]["readinessProbe"]["grpc"] == {"port": port}
    for name, template in templates.items():
        (container,) = template["spec"]["containers"]
        assert {"readinessProbe", "livenessProbe", "startupProbe"} <= set(container), name
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def as_pod(template: dict[str, Any]) -> dict[str, Any]:
    """A pod template as a pod of its own."""
    metadata = {"name": "pod", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def references(node: Any) -> set[str]:
    """Names of the ConfigMaps and Secrets that a pod template refers to."""
    if isinstance(node, list):
        return {name for each in node for name in references(each)}
    if not isinstance(node, dict):
        return set()
    own = {node[kind]["name"] for kind in ("configMap", "secretRef", "secretKeyRef") if kind in node}
    return own | {name for each in node.values() for name in references(each)}

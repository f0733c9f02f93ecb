"""The cluster of `ray up`: taken by Ray's own check, its nodes declare the pools that Baton asks for."""

from typing import Any

import pytest

from deploy.ray_cluster.spawner import pool
from tests.support.manifests import MANIFESTS, documents


def test_ray_takes_the_cluster_and_its_node_types_declare_the_pools() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = prepare_config(the_cluster())
    validate_config(cluster)
    types = cluster["available_node_types"]
    assert cluster["head_node_type"] == "head"
    assert {role: types[role]["resources"][pool(role)] for role in ("prefill", "generate")} == {
        "prefill": 2,
        "generate": 1,
    }
    assert [name for name, each in types.items() if each["labels"] != {"baton-pool": name}] == []
    assert types["prefill"]["min_workers"] and types["generate"]["min_workers"]


def test_a_field_that_ray_does_not_know_is_seen() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises(ValidationError, match="max_worker"):
        validate_config(prepare_config({**the_cluster(), "max_worker": 2}))


def test_the_files_that_are_copied_to_the_nodes_are_there_or_are_the_users_own() -> None:
    sources = the_cluster()["file_mounts"].values()
    assert [each for each in sources if not each.startswith("~") and not (MANIFESTS / each).is_file()] == []


def the_cluster() -> dict[str, Any]:
    """The file that `ray up` reads."""
    (found,) = documents(MANIFESTS / "ray_cluster.yaml")
    return found

"""Ray cluster whose own autoscaler starts and ends nodes. It uses Ray's fake node provider, whose nodes are processes
of this machine."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE

from tests.support.clusters.on_ray.ray_heads import RayHead, environment, free_port, ray_head
from tests.support.folders import ROOT
from tests.support.node_provider import NodeProvider

IDLE_S = 6.0
"""Idle time in seconds after which the autoscaler removes a node."""
NODE_BYTES = 4 * 2**30
"""Memory in bytes that a node declares."""
_LOOK = """
import json, sys
from ray.autoscaler.v2.sdk import get_cluster_status
status = get_cluster_status(sys.argv[1])
print(json.dumps([each.ray_node_type_name for each in (*status.active_nodes, *status.idle_nodes)]))
"""


@contextlib.contextmanager
def autoscaled_ray(node_types: Mapping[str, Mapping[str, int]], *, most: int = 3) -> Iterator[RayHead]:
    """Run a Ray cluster whose head node offers no resources for workers. Its autoscaler starts nodes on demand, at most
    `most` of each type. `node_types` maps the name of a type to the resources that its nodes declare. Nodes have the
    label baton-pool=TYPE."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="baton-autoscaling-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(_config(node_types, most, f"127.0.0.1:{port}")))
        variables = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_FAKE_CLUSTER": "1",
            "RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE,
            "RAY_enable_autoscaler_v2": "1",
        }
        options = (f"--autoscaling-config={config}",)
        with ray_head({}, num_cpus=0, port=port, options=options, variables=variables) as head:
            yield head


def nodes_by_type(head: RayHead) -> Counter[str]:
    """Return the number of live nodes of each type, as Ray's autoscaler counts them, without the head."""
    variables = os.environ | environment()
    command = [sys.executable, "-c", _LOOK, head.address]
    told = subprocess.run(command, env=variables, text=True, capture_output=True, timeout=60, check=True)
    counted = Counter[str](json.loads(told.stdout.splitlines()[-1]))
    del counted[FAKE_HEAD_NODE_TYPE]
    return counted


def _config(node_types: Mapping[str, Mapping[str, int]], most: int, address: str) -> dict[str, Any]:
    """Return the configuration that `ray up` would pass to Ray's head. Ray's wheel lacks a file that it needs when this
    provider is selected by its built-in name. Therefore, the provider is configured as an external one, which has no
    defaults."""
    types = {
        name: {
            "resources": {"CPU": 1, "memory": NODE_BYTES, "object_store_memory": 80_000_000, **resources},
            "labels": {"baton-pool": name},
            "node_config": {},
            "min_workers": 0,
            "max_workers": most,
        }
        for name, resources in node_types.items()
    }
    commands = ("setup", "head_setup", "worker_setup", "initialization", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "autoscaled",
        "max_workers": most * len(node_types),
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": {
            "type": "external",
            "module": f"{NodeProvider.__module__}.{NodeProvider.__name__}",
            "gcs_address": address,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
        },
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            **types,
        },
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        **{f"{name}_commands": [] for name in commands},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        "cluster_synced_files": [],
    }

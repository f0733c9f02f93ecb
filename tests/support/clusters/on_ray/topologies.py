"""Clusters on Ray that tests share. A cluster is started for the first test that needs it, and restarted after a test
that broke it. Every test receives an intact cluster."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from baton import Client
from tests.support.clusters.on_ray.autoscaled_rays import autoscaled_ray, nodes_by_type
from tests.support.clusters.on_ray.hosts import Host, hosts
from tests.support.clusters.on_ray.ray_clusters import ServedCluster, served, until, until_settled
from tests.support.clusters.on_ray.ray_heads import RayHead, ray_head, ray_node
from tests.support.clusters.on_ray.topology import Topology
from tests.support.models.letter_models import LetterShape

MakeFolder = Callable[[str], Path]
"""Creates and returns a new folder whose name begins with the given string."""

CORE_SETTINGS = ("supervision.heartbeat_s=0.5", "supervision.dead_after_s=15")
SHAPE = LetterShape(num_layers=6, hidden=256, inner=768, num_heads=4, num_kv_heads=2, max_tokens=4096)
"""Shape of the served model. Workers load it quickly, and long prompts and streams take some time."""
CORE = max(os.sched_getaffinity(0))
"""CPU core of the orchestrator of `one_host`."""
NUM_ENGINES, NUM_SLOTS, NUM_QUEUED = 2, 4, 12
"""Number of generation engines of `one_host`, number of slots of each engine, and limit on queued requests."""
NODE_TYPES = {"prefill": {"baton_prefill": 1}, "generate": {"baton_generate": 1}}
"""Node types as in `deploy/manifests/ray_cluster.yaml`, with resources for one worker per node."""
HOST_POOLS = {"baton_prefill": 1, "baton_generate": 2}
BARE_POOLS = {"baton_prefill": 4, "baton_generate": 1}
PATIENT_RAY = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "15",
}
"""Health check settings: Ray declares an unreachable host dead after 15 to 45 s, which is later than tests restore
links, but earlier than by default."""


@dataclass(frozen=True)
class HostsCluster:
    """Cluster over two hosts. Each host runs one rank of a prefill group and one generation engine."""

    running: ServedCluster
    """The cluster, launched on host `first`."""
    ray: RayHead
    head: Host
    """Host that runs only Ray's head."""
    first: Host
    second: Host
    """Node with the label `FAR`. On this host, the folder `hidden` appears empty."""
    outside: Host
    """Host that is not a node of the Ray instance."""
    hidden: Path
    """Folder with the draft model on the launching host `first`. It appears empty on host `second`."""


FAR = "baton-place=far"


@dataclass(frozen=True)
class GrownCluster:
    """Cluster on a Ray instance that starts nodes on demand."""

    running: ServedCluster
    ray: RayHead


def make_topologies(model: Path, slow: Callable[[], Path], make_folder: MakeFolder) -> Mapping[str, Topology]:
    """Return all topologies by the names of their fixtures. None is started yet. They serve `model`, except the cluster
    that scales by load: it serves a slower model, so that few requests suffice to load it."""
    return {
        "one_host": Topology(lambda: _one_host(model, make_folder), lambda made: _check_served(made, NUM_ENGINES)),
        "over_hosts": Topology(lambda: _over_hosts(model, make_folder), lambda made: _check_served(made.running, 2)),
        "grown": Topology(lambda: _grown(slow(), make_folder), _check_grown),
        "bare": Topology(_bare, lambda head: until(head.is_empty)),
    }


@contextmanager
def _one_host(model: Path, make_folder: MakeFolder) -> Iterator[ServedCluster]:
    """Run a prefill group of two ranks and two generation engines on a Ray instance of the cluster's own."""
    settings = (
        *(f"generate.num_slots={NUM_SLOTS}", f"orchestrator.max_queued_requests={NUM_QUEUED}"),
        *("prefill.num_ranks=2", f"generate.num_groups={NUM_ENGINES}", f"orchestrator.cores=[{CORE}]"),
        *("orchestrator.lease_ttl_s=45", "orchestrator.report_wait_s=10", "prefill.watchdog_floor_s=10"),
        *("generate.speculation=auto", "generate.draft_tokens=2", "http.port=0"),
    )
    with served(make_folder("one"), model, *CORE_SETTINGS, *settings) as running:
        yield running
    assert not running.stdout  # Ray's messages about lost workers do not appear on standard output


@contextmanager
def _over_hosts(model: Path, make_folder: MakeFolder) -> Iterator[HostsCluster]:
    hidden, share = make_folder("launcher"), make_folder("share")
    for folder in (hidden, share):
        (folder / "drafts").symlink_to(model, target_is_directory=True)
    with ExitStack() as stack:
        head, first, second, outside = stack.enter_context(hosts(4))
        ray = stack.enter_context(ray_head({}, host=head, variables=PATIENT_RAY))
        if second.namespace:
            second.run("mount", "-t", "tmpfs", "tmpfs", str(hidden))
        stack.enter_context(ray_node(ray, HOST_POOLS, first))
        stack.enter_context(ray_node(ray, HOST_POOLS, second, label=FAR))
        settings = (
            *("prefill.num_ranks=2", "prefill.across_nodes=true", "generate.num_groups=2"),
            *("orchestrator.host=0.0.0.0", f'model.search=["{share}"]', *draft_settings(hidden)),
        )
        yield HostsCluster(
            stack.enter_context(served(make_folder("hosts"), model, *settings, address=ray.address, host=first)),
            *(ray, head, first, second, outside, hidden),
        )


def draft_settings(hidden: Path) -> tuple[str, ...]:
    """Return the settings for speculation with the draft model in folder `hidden`."""
    return ("generate.speculation=model", f"generate.draft_model={hidden / 'drafts'}")


@contextmanager
def _grown(model: Path, make_folder: MakeFolder) -> Iterator[GrownCluster]:
    labels = [f'{role}.node_labels=["baton-pool={role}"]' for role in NODE_TYPES]
    settings = (
        *("prefill.num_ranks=1", "generate.num_slots=2", "ray.node_wait_s=100", *labels),
        *("autoscaling.mode=act", "autoscaling.max=3", "autoscaling.cooldown_s=4", "autoscaling.cold_start_s=5"),
    )
    with (
        autoscaled_ray(NODE_TYPES) as ray,
        served(make_folder("grown"), model, *CORE_SETTINGS, *settings, address=ray.address) as running,
    ):
        yield GrownCluster(running, ray)


@contextmanager
def _bare() -> Iterator[RayHead]:
    """Run a Ray instance without a cluster. It has two nodes with the same pools; the second node has a label."""
    with ray_head(BARE_POOLS) as head, ray_node(head, BARE_POOLS, label="baton-pool=prefill"):
        yield replace(head, num_nodes=2)


def _check_served(running: ServedCluster, num_engines: int) -> None:
    """Check that one prefill group and `num_engines` engines serve, that each has its own workers, and that no resource
    is held."""
    with Client(running.target) as client:
        until_settled(running, client)
        until(lambda: client.cluster_state().why_degraded == ())
        state = client.cluster_state()
    assert state.why_not_serving == ()
    assert [group.role for group in state.groups] == ["prefill", *["generate"] * num_engines]
    assert not [group.name for group in state.groups if group.is_drained or group.lender]


def _check_grown(made: GrownCluster) -> None:
    until(lambda: nodes_by_type(made.ray) == {"prefill": 1, "generate": 1}, 90.0)
    _check_served(made.running, 1)

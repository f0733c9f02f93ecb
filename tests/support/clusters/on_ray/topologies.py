"""Clusters on Ray that tests share: each is started for the first test that needs it, handed out whole to every one,
and started anew after a test that broke it."""

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
"""Return a new folder whose name begins so."""

CORE_SETTINGS = ("supervision.heartbeat_s=0.5", "supervision.dead_after_s=15")
SHAPE = LetterShape(num_layers=6, hidden=256, inner=768, num_heads=4, num_kv_heads=2, max_tokens=4096)
"""Of the model that they serve: workers load it at once, and long prompts and streams take a while."""
CORE = max(os.sched_getaffinity(0))
"""Of the orchestrator of `one_host`."""
NUM_ENGINES, NUM_SLOTS, NUM_QUEUED = 2, 4, 12
"""Of `one_host`; slots of each engine."""
NODE_TYPES = {"prefill": {"baton_prefill": 1}, "generate": {"baton_generate": 1}}
"""As `deploy/manifests/ray_cluster.yaml` has them, with room for one worker each."""
HOST_POOLS = {"baton_prefill": 1, "baton_generate": 2}
BARE_POOLS = {"baton_prefill": 4, "baton_generate": 1}
PATIENT_RAY = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "15",
}
"""A host that is cut off is lost after 15 to 45 s: later than links are mended, and earlier than by default."""


@dataclass(frozen=True)
class HostsCluster:
    """A cluster over hosts: a chain with a rank on each of two, an engine on each as well."""

    running: ServedCluster
    """Launched on `first`."""
    ray: RayHead
    head: Host
    """Ray's head alone."""
    first: Host
    second: Host
    """A node with the label `FAR`, which sees an empty folder in the place of `hidden`."""
    outside: Host
    """No node of the Ray."""
    hidden: Path
    """A folder of the launcher with the model that drafts."""


FAR = "baton-place=far"


@dataclass(frozen=True)
class GrownCluster:
    """A cluster on a Ray that starts nodes as they are needed."""

    running: ServedCluster
    ray: RayHead


def make_topologies(model: Path, slow: Callable[[], Path], make_folder: MakeFolder) -> Mapping[str, Topology]:
    """All, by the names of their fixtures; none is started yet. They serve `model`; the one that
    scales by load serves a model that is slow enough to be loaded."""
    return {
        "one_host": Topology(lambda: _one_host(model, make_folder), lambda made: _check_served(made, NUM_ENGINES)),
        "over_hosts": Topology(lambda: _over_hosts(model, make_folder), lambda made: _check_served(made.running, 2)),
        "grown": Topology(lambda: _grown(slow(), make_folder), _check_grown),
        "bare": Topology(_bare, lambda head: until(head.is_empty)),
    }


@contextmanager
def _one_host(model: Path, make_folder: MakeFolder) -> Iterator[ServedCluster]:
    """A chain of two ranks and two engines on a Ray of the cluster's own."""
    settings = (
        *(f"generate.num_slots={NUM_SLOTS}", f"orchestrator.max_queued_requests={NUM_QUEUED}"),
        *("prefill.num_ranks=2", f"generate.num_groups={NUM_ENGINES}", f"orchestrator.cores=[{CORE}]"),
        *("orchestrator.lease_ttl_s=45", "orchestrator.report_wait_s=10", "prefill.watchdog_floor_s=10"),
        *("generate.speculation=auto", "generate.draft_tokens=2", "http.port=0"),
    )
    with served(make_folder("one"), model, *CORE_SETTINGS, *settings) as running:
        yield running
    assert not running.stdout  # what Ray has to say of lost workers


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
    """Speculation by the model that lies in this folder."""
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
    """Two nodes with the same pools, the second with a label, and no cluster."""
    with ray_head(BARE_POOLS) as head, ray_node(head, BARE_POOLS, label="baton-pool=prefill"):
        yield replace(head, num_nodes=2)


def _check_served(running: ServedCluster, num_engines: int) -> None:
    """One chain and that many engines serve, with workers of their own, and nobody holds anything."""
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

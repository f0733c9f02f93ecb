"""Output of `baton status`: the health of a running cluster, its devices, its groups and its slots."""

from collections.abc import Iterator
from datetime import UTC, datetime

import grpc
from rich.console import Console
from rich.table import Table

from baton.calls.cluster_state import ClusterState, GenerationStatus, cluster_state_from_proto
from baton.channel_options import Keepalive, channel_options
from baton.errors import UnauthenticatedError, VersionMismatchError
from baton.proto_types import read
from baton.results.timings import DraftCounts
from baton.rpc_status import STATUS_OF, from_rpc_error
from baton.transport.proto_types import kernels_from_proto
from baton.v1 import orchestrator_pb2
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from deploy.commands.keyed_channel import keyed
from deploy.commands.record import load_record, secret_for
from orchestrator.api.keeping import profile_from_proto

_ANSWER_S = 5.0
_NUM_CHANGES = 5
"""Maximum number of the autoscaler's latest changes that `baton status` shows."""


def show_status(name: str, api_key: str | None = None) -> int:
    """Print the state of the cluster `name`. The request for it contains the cluster's secret and `api_key`. Return 0
    if the cluster serves, and 1 if it does not serve or does not answer. Raises ConfigError if the cluster's secret
    cannot be read."""
    record = load_record(name)
    if record is None or not record.endpoint:
        print(f"cluster {name}: {'not running' if record is None else 'starting'}")
        return 1
    secret = secret_for(None, name)
    with grpc.insecure_channel(record.endpoint, options=channel_options(Keepalive())) as connection:
        channel = keyed(connection, api_key, secret)
        try:
            request = orchestrator_pb2.GetClusterStateRequest()
            state = cluster_state_from_proto(OrchestratorStub(channel).GetClusterState(request, timeout=_ANSWER_S))
        except (VersionMismatchError, grpc.RpcError) as error:
            print(f"cluster {name}: {_refusal(record.endpoint, error)}")
            return 1
    queued = f"{state.num_queued} queued with {state.num_queued_tokens} prompt tokens"
    print(f"cluster {name} on {record.endpoint}: {state.num_running} running, {queued}")
    for line in (*_health(state), *processors_of(state), *drafts_of(state), *scaling_of(state)):
        print(line)
    if record.http:
        print(f"OpenAI's API on {record.http}/v1")
    if state.metrics_endpoint:
        print(f"metrics on http://{state.metrics_endpoint}/metrics")
    console = Console()
    console.print(groups_table(state))
    console.print(slots_table(state))
    return 1 if state.why_not_serving else 0


def _refusal(endpoint: str, error: VersionMismatchError | grpc.RpcError) -> str:
    known = from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
    if isinstance(known, VersionMismatchError):
        return str(known)
    remedy = "; give a key by --api-key-env" if isinstance(known, UnauthenticatedError) else ""
    return f"{endpoint} does not answer ({STATUS_OF[type(known)].name}{remedy})"


def groups_table(state: ClusterState) -> Table:
    """Return the table of groups, with one line per group."""
    table = Table("group", "ready", "epoch", "requests", "leaked", "preempted", "endpoints", box=None)
    for group in state.groups:
        preempted = "" if group.generation is None else group.generation.num_preemptions
        counts = (group.epoch, group.num_requests, group.num_leaked, preempted)
        name = f"{group.name} (lent by {group.lender})" if group.lender else group.name
        table.add_row(name, group.readiness, *(str(count) for count in counts), " ".join(group.endpoints))
    return table


def slots_table(state: ClusterState) -> Table:
    """Return the table of slots and memory.

    Each generation group has two lines: the number of its slots in each state, and its KV memory in each state with the
    name of its residency policy. The numbers of all states add up to the total. Groups on nodes with a prefix store
    (the node's prefix cache) have another line: the KV of earlier prompts, and the KV that the group has fetched from
    other nodes and sent to them.
    """
    table = Table("", "", "all", "free", "leased", "active", "quarantined", "held", "fetched", "sent", box=None)
    for group in state.groups:
        if (held := group.generation) is not None:
            slots = (held.num_slots, held.num_free, held.num_leased, held.num_active, held.num_quarantined)
            table.add_row(group.name, "slots", *(str(count) for count in slots))
            kv = held.kv
            parts = (kv.num_bytes_free, kv.num_bytes_leased, kv.num_bytes_active, kv.num_bytes_quarantined)
            table.add_row(_policy(held), "KV, MiB", *map(_mib, (kv.num_bytes, *parts, held.num_bytes_held)))
    for group in state.groups:
        if (store := group.prefix_store) is not None:
            whole, free = store.limit_bytes, store.limit_bytes - store.num_bytes
            moved = (store.num_bytes_fetched, store.num_bytes_sent)
            sums = (*map(_mib, (whole, free)), "", "", "", *map(_mib, (store.num_bytes, *moved)))
            table.add_row(group.name, "prefixes, MiB", *sums)
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _policy(held: GenerationStatus) -> str:
    return f"{held.residency} (approximate)" if held.is_approximate else ""


def _health(state: ClusterState) -> Iterator[str]:
    yield from (f"not serving: {why}" for why in state.why_not_serving)
    yield from (f"degraded: {why}" for why in state.why_degraded)
    if state.num_degraded:
        yield f"prefills without a prefill group so far, though there are some: {state.num_degraded}"


def scaling_of(state: ClusterState) -> Iterator[str]:
    """Yield a line that explains the autoscaler's current decision. Then yield a line, with the time, for each of the
    last `_NUM_CHANGES` decisions to change groups. Yields nothing if the autoscaler is off."""
    if (scaling := state.scaling) is None:
        return
    yield f"autoscaling ({scaling.mode}): {scaling.explanation}"
    for change in scaling.changes[-_NUM_CHANGES:]:
        made = datetime.fromtimestamp(change.unix_ns / 1e9, UTC).astimezone()
        yield f"  {made:%H:%M:%S} {'' if scaling.mode == 'act' else 'would have: '}{change.explanation}"


def processors_of(state: ClusterState) -> Iterator[str]:
    """Yield a line for each kind of processor, with the kernels that its workers use, and for each device on which
    workers compute, with its main rates. Each line begins with the groups of these workers."""
    groups: dict[str, dict[str, None]] = {}
    for group in state.groups:
        for status in group.statuses:
            kernels = kernels_from_proto(status.kernels)
            groups.setdefault(f"{kernels.processor}: {kernels}", {})[group.name] = None
            if status.HasField("profile"):
                groups.setdefault(str(profile_from_proto(status.profile)), {})[group.name] = None
    yield from (f"{', '.join(names)} on {processor}" for processor, names in groups.items())


def drafts_of(state: ClusterState) -> Iterator[str]:
    """Yield a line for each generation group whose engine has measured a step that verified drafts. The line shows, for
    each source of drafts, how many drafts were accepted so far. It also shows the number of drafts and the duration of
    the latest round (a step that verifies drafts, and the steps that made these drafts)."""
    for group in state.groups:
        if group.generation is None or not group.generation.HasField("speculation"):
            continue
        seen = group.generation.speculation
        if not seen.measured_s:
            continue
        accepted = ", ".join(str(read(DraftCounts, each.counts)) for each in seen.sources)
        predicted = f", predicted {seen.predicted_s * 1e3:.0f} ms" if seen.predicted_s else ""
        latest = f"latest round: {seen.num_drafts} drafts, {seen.measured_s * 1e3:.0f} ms{predicted}"
        yield f"{group.name}: drafts accepted so far: {accepted}; {latest}"

"""State that a supervisor needs after a restart, possibly on another node: operators' orders, the orchestrator's
address, and settings with which the workers were started. It is kept in Ray's key-value store as long as that Ray runs.

Orders are written before they are carried out, so that a restarted supervisor does not start a group that was ordered
to leave. A new orchestrator gets the orders from the supervisor. Gateways read the orchestrator's address from the
store (`deploy.ray_cluster.finding`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from orchestrator.membership.view import Orders

KEY = "baton-supervisor"
"""Key of the memory in Ray's key-value store, in the cluster's namespace."""
_SETS = ("drained", "leaving", "stand_ins", "surplus")
_MAPS = ("models", "lent")


@dataclass(frozen=True)
class Address:
    """Address and ports at which an orchestrator serves."""

    endpoint: str
    """Address for clients, host:port."""
    node_id: str
    """Id of its node in Ray."""
    ports: tuple[int, int | None]
    """Ports for clients and for metrics; None: no metrics."""


@dataclass(frozen=True)
class Memory:
    """State that the supervisor of one cluster keeps for its restart."""

    orders: Orders
    address: Address | None = None
    """Current or latest address of the orchestrator; None before an orchestrator has served."""
    layout_fingerprint: str = ""
    """Fingerprint of the KV layout of the groups that existed when this was saved."""
    step_times: Mapping[str, str] = field(default_factory=dict)
    """Path of the engines' step times, by the folder of their model. It is kept because a supervisor on another node
    would choose another path. The path is part of a worker's configuration, and running workers are only used again if
    their configuration is equal."""
    worker_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of memory that each worker reserves on its node, by role; empty on a Ray that Baton started."""

    def save(self, namespace: str) -> None:
        """Store this state for the cluster of that namespace, and replace the state that was stored before."""
        orders = {name: sorted(getattr(self.orders, name)) for name in _SETS}
        rest = {
            "address": None if self.address is None else asdict(self.address),
            "layout_fingerprint": self.layout_fingerprint,
            "step_times": dict(self.step_times),
            "worker_bytes": dict(self.worker_bytes),
        }
        fields = {**orders, **{name: dict(getattr(self.orders, name)) for name in _MAPS}, **rest}
        _internal_kv_put(KEY, json.dumps(fields), namespace=namespace)


def load_memory(namespace: str) -> Memory | None:
    """Return the state that an earlier supervisor of the cluster stored; None if the cluster's groups have never all
    started."""
    text: bytes | None = _internal_kv_get(KEY, namespace=namespace)
    return None if text is None else memory_of(text)


def memory_of(text: str | bytes) -> Memory:
    """Parse the text that `save` has stored, and return the state."""
    fields = json.loads(text)
    kept: dict[str, Any] = {name: frozenset(fields[name]) for name in _SETS}
    orders = Orders(**kept | {name: fields[name] for name in _MAPS})
    address = fields["address"]
    if address is not None:
        address = Address(address["endpoint"], address["node_id"], tuple(address["ports"]))
    return Memory(orders, address, fields["layout_fingerprint"], fields["step_times"], fields["worker_bytes"])


def forget_memory(namespace: str) -> None:
    """Delete the state that is stored for a cluster that has ended. Does nothing if there is none."""
    _internal_kv_del(KEY, namespace=namespace)

"""State that a supervisor needs after a restart, possibly on another node: operators' orders, the orchestrator's
address, and settings with which the workers were started. The state is stored in Ray's key-value store, and exists as
long as that Ray runs.

An operator's order is written before it is carried out. A restarted supervisor therefore does not start a group whose
workers an operator has ordered to stop. A new orchestrator gets the orders from the supervisor. Gateways read the
orchestrator's address from the store (`deploy.ray_cluster.finding`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from baton.transport.terms import NO_TERM
from orchestrator.membership.view import Orders

KEY = "baton-supervisor"
"""Key under which a supervisor's state is stored in Ray's key-value store, in the cluster's namespace."""
_TERM_KEY = "baton-term-"
"""Prefix of the keys of claimed terms, each followed by the term."""
_SETS = ("drained", "leaving", "stand_ins", "surplus")
_MAPS = ("models", "lent")


@dataclass(frozen=True)
class Address:
    """Address and ports at which an orchestrator serves."""

    endpoint: str
    """Address for clients, host:port."""
    node_id: str
    """Ray's id of the node on which the orchestrator runs."""
    ports: tuple[int, int | None]
    """Pair of the port for clients and the port for metrics. The second is None if metrics are not served."""


@dataclass(frozen=True)
class Memory:
    """State that the supervisor of one cluster stores, and reads again after its restart."""

    orders: Orders
    address: Address | None = None
    """Address of the current orchestrator, or of the last one if none serves now. None before the first orchestrator
    has served."""
    layout_fingerprint: str = ""
    """Fingerprint of the KV layout that the groups of workers had when this state was saved."""
    worker_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of memory that a worker of each role reserves on its node. Empty if Baton itself started the Ray."""

    def save(self, namespace: str) -> None:
        """Store this state in Ray's key-value store for the cluster `namespace`. The state that was stored before is
        replaced."""
        orders = {name: sorted(getattr(self.orders, name)) for name in _SETS}
        rest = {
            "address": None if self.address is None else asdict(self.address),
            "layout_fingerprint": self.layout_fingerprint,
            "worker_bytes": dict(self.worker_bytes),
        }
        fields = {**orders, **{name: dict(getattr(self.orders, name)) for name in _MAPS}, **rest}
        _internal_kv_put(KEY, json.dumps(fields), namespace=namespace)


def load_memory(namespace: str) -> Memory | None:
    """Return the state that an earlier supervisor of the cluster stored, or None if no supervisor has stored one. A
    supervisor first stores its state when all groups of the cluster have started."""
    text: bytes | None = _internal_kv_get(KEY, namespace=namespace)
    return None if text is None else memory_of(text)


def memory_of(text: str | bytes) -> Memory:
    """Parse a state in the JSON format of `Memory.save`."""
    fields = json.loads(text)
    kept: dict[str, Any] = {name: frozenset(fields[name]) for name in _SETS}
    orders = Orders(**kept | {name: fields[name] for name in _MAPS})
    address = fields["address"]
    if address is not None:
        address = Address(address["endpoint"], address["node_id"], tuple(address["ports"]))
    return Memory(orders, address, fields["layout_fingerprint"], fields["worker_bytes"])


def forget_memory(namespace: str) -> None:
    """Delete the stored state of a cluster that has ended, except for the terms. Does nothing if no state is stored."""
    _internal_kv_del(KEY, namespace=namespace)


class RayTermStore:
    """Claimed terms of a cluster's orchestrators in Ray's key-value store. Implements `deploy.groups.terms.TermStore`.
    The terms remain when the cluster ends, because an orchestrator that was cut off may still run."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def highest(self) -> int:
        keys = _internal_kv_list(_TERM_KEY, namespace=self._namespace)
        return max((int(key.removeprefix(_TERM_KEY.encode())) for key in keys), default=NO_TERM)

    def create(self, term: int) -> bool:
        """Claim a term, and delete the lower ones. Return False if it was claimed before."""
        lower = self.highest()
        existed = _internal_kv_put(f"{_TERM_KEY}{term}", b"", overwrite=False, namespace=self._namespace)
        if not existed and NO_TERM < lower < term:
            _internal_kv_del(f"{_TERM_KEY}{lower}", namespace=self._namespace)
        return not existed

"""What a supervisor's next life has to know: operators' orders, the orchestrator's ports, and the KV layout of groups
that may all have left since. Kept in Ray's key-value store, which lives as long as that Ray does.

Orders are written before they are carried out, so that a group that was to leave does not come back with a new
supervisor; the next orchestrator gets them from the supervisor.
"""

import json
from dataclasses import dataclass

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from orchestrator.membership.view import Orders

_KEY = "baton-supervisor"
_SETS = ("drained", "leaving", "stand_ins")
_MAPS = ("models", "lent")


@dataclass(frozen=True)
class Memory:
    """What the supervisor of one cluster keeps for its next life."""

    orders: Orders
    ports: tuple[int, int | None] | None = None
    """Ports of the orchestrator and of its metrics (None: no metrics); None before the orchestrator has served."""
    layout_fingerprint: str = ""
    """Fingerprint of the KV layout of the groups that were there when this was kept."""

    def save(self, namespace: str) -> None:
        """Keep this for the cluster of that namespace, replacing what was kept before."""
        orders = {name: sorted(getattr(self.orders, name)) for name in _SETS}
        rest = {"ports": self.ports, "layout_fingerprint": self.layout_fingerprint}
        fields = {**orders, **{name: dict(getattr(self.orders, name)) for name in _MAPS}, **rest}
        _internal_kv_put(_KEY, json.dumps(fields), namespace=namespace)


def load_memory(namespace: str) -> Memory | None:
    """Return what an earlier supervisor of the cluster kept; None when its groups have never been up."""
    text = _internal_kv_get(_KEY, namespace=namespace)
    if text is None:
        return None
    fields = json.loads(text)
    drained, leaving, stand_ins = (frozenset(fields[name]) for name in _SETS)
    orders = Orders(drained, leaving, stand_ins, **{name: fields[name] for name in _MAPS})
    return Memory(orders, fields["ports"] and tuple(fields["ports"]), fields["layout_fingerprint"])


def forget_memory(namespace: str) -> None:
    """Delete what is kept for a cluster that has ended. Harmless when nothing was kept."""
    _internal_kv_del(_KEY, namespace=namespace)

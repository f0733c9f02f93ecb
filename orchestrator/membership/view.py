"""The groups of a cluster as the supervisor pushes them, and what operators have ordered for them.

Made by `deploy.groups.cluster`; kept by `orchestrator.membership.members`. Pure.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from baton.types import Epoch


@dataclass(frozen=True)
class PrefillGroup:
    """A chain of ranks with its present links. A chain that is linked again is another PrefillGroup."""

    name: str
    endpoints: tuple[str, ...]
    """host:port of each rank, in rank order."""
    epoch: Epoch
    ready: bool = True
    prefix_store: str = ""
    """Name of the ranks' prefix store, equal for groups of either role that share one; empty: none."""
    layout_fingerprint: str = ""
    """Fingerprint of the layout of the group's KV; empty: unknown, and all groups have the same."""

    @property
    def incarnation(self) -> Hashable:
        """Return an identity of this incarnation of the group, which changes when the group is repaired."""
        return self.name, self.endpoints, self.epoch


@dataclass(frozen=True)
class GenerationGroup:
    """One engine's slots, and the batch that decodes their rows."""

    name: str
    endpoint: str
    layout_fingerprint: str
    """Fingerprint of the KV layout that the group accepts."""
    num_slots: int
    max_slot_tokens: int
    """Tokens that a slot may hold, prompt and output."""
    ready: bool = True
    prefix_store: str = ""
    """Name of the store in which the group's slots find prefixes and its answers are kept; empty: none."""
    residency: str = ""
    """Name of the group's residency policy: it decides where KV is stored and to which part of it sequences attend."""
    is_approximate: bool = False
    """True if the group's sequences attend to fewer than all tokens."""

    def may_serve(self, *, exact: bool) -> bool:
        """Return whether the group may serve a request that, if `exact`, needs attention to all tokens."""
        return not (exact and self.is_approximate)

    @property
    def incarnation(self) -> Hashable:
        """Return an identity of this incarnation of the group, which changes when the group is replaced."""
        return self.name, self.endpoint


def endpoints_of(incarnation: Hashable) -> tuple[str, tuple[str, ...]]:
    """Return the role of a group, and the endpoints of its workers, from the group's `incarnation`."""
    assert isinstance(incarnation, tuple), f"{incarnation} is not the incarnation of a group"
    endpoints = incarnation[1]
    return ("generate", (endpoints,)) if isinstance(endpoints, str) else ("prefill", endpoints)


Group = PrefillGroup | GenerationGroup
G = TypeVar("G", PrefillGroup, GenerationGroup)


@dataclass(frozen=True)
class AbsentGroup:
    """A group that is known and has no workers now."""

    name: str
    role: str
    """The group's role: prefill or generate."""
    starts: bool = False
    """True if the group's workers are to be started; false if it has left by an operator's order."""
    error: str = ""
    """Why the group's last start failed, in one line; the start is retried."""


@dataclass(frozen=True)
class EndedWorker:
    """A worker whose process has ended."""

    endpoint: str
    """host:port that the worker served on."""
    computing: tuple[str, ...] = ()
    """Fingerprints of the requests whose first tokens it was computing when it crashed; empty if it did not crash."""


@dataclass(frozen=True)
class ClusterView:
    """All groups, present and expected. A group that is being repaired is in it, as not ready."""

    prefill: tuple[PrefillGroup, ...] = ()
    generation: tuple[GenerationGroup, ...] = ()
    absent: tuple[AbsentGroup, ...] = ()
    ended: tuple[EndedWorker, ...] = ()
    """Workers whose processes have ended lately, the latest last."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots of all generation groups."""
        return sum(group.num_slots for group in self.generation)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return all groups with workers, of both roles."""
        return (*self.prefill, *self.generation)

    def chains_for(self, generation: GenerationGroup) -> "ClusterView":
        """Return this view with only those prefill groups whose KV the generation group can take: while models are
        being changed, some make KV of another layout."""
        layouts = ("", generation.layout_fingerprint)
        return replace(self, prefill=tuple(group for group in self.prefill if group.layout_fingerprint in layouts))

    @property
    def endpoints(self) -> frozenset[str]:
        """Return the endpoints of all workers."""
        ranks = (endpoint for group in self.prefill for endpoint in group.endpoints)
        return frozenset((*ranks, *(group.endpoint for group in self.generation)))


@dataclass(frozen=True)
class Orders:
    """Operators' orders for groups, present or not. The orchestrator changes orders. The supervisor carries them out,
    and keeps them for a restart of either."""

    drained: frozenset[str] = frozenset()
    """Names of groups that are to get no new work."""
    leaving: frozenset[str] = frozenset()
    """Names of drained groups that are to have no workers: they had no work left."""
    stand_ins: frozenset[str] = frozenset()
    """Names of groups beyond the configured ones, which serve while others are away. A stand-in that has left is
    forgotten."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Folder of the model that a group loads when it starts, by the group's name; others load the configured one."""
    lent: Mapping[str, str] = field(default_factory=dict)
    """Name of the worker that a stand-in has borrowed from a group of the other role, by the stand-in's name. The
    worker goes back to its own group when the stand-in leaves."""

    surplus: frozenset[str] = frozenset()
    """Names of groups that the autoscaler drained because fewer are enough. It may take them back."""

    def without(self, names: Collection[str]) -> "Orders":
        """Return these orders without any for the groups of these names."""
        models = {name: model for name, model in self.models.items() if name not in names}
        lent = {name: worker for name, worker in self.lent.items() if name not in names}
        kept = (each - {*names} for each in (self.drained, self.leaving, self.stand_ins, self.surplus))
        drained, leaving, stand_ins, surplus = kept
        return Orders(drained, leaving, stand_ins, models, lent, surplus)

    def lender(self, name: str) -> str:
        """Return the name of the group whose worker the named group has borrowed; empty if it has borrowed none."""
        return place_of(self.lent[name])[0] if name in self.lent else ""

    def borrowers(self, name: str) -> dict[int, str]:
        """Return the groups that have borrowed workers of the named group, by the workers' ranks in it."""
        places = {borrower: place_of(worker) for borrower, worker in self.lent.items()}
        return {rank: borrower for borrower, (group, rank) in places.items() if group == name}


def role_of(group: str) -> str:
    """Return the role of the group of that name, like prefill for prefill-0."""
    return group.partition("-")[0]


def place_of(worker: str) -> tuple[str, int]:
    """Return the group and the rank of the worker of that name, like prefill-0.1 or generate-0."""
    group, _, rank = worker.partition(".")
    return group, int(rank or 0)

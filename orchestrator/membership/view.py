"""Groups of a cluster as the supervisor reports them, and the operators' orders for them.

Made by `deploy.groups.cluster`; stored by `orchestrator.membership.members`. Pure.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from baton.types import Epoch


@dataclass(frozen=True)
class PrefillGroup:
    """Prefill group: a chain of ranks with its present links. When the links are replaced, a new PrefillGroup is
    made."""

    name: str
    endpoints: tuple[str, ...]
    """host:port of each rank, in rank order."""
    epoch: Epoch
    ready: bool = True
    prefix_store: str = ""
    """Name of the prefix store that the ranks use, which groups of either role may share; empty if they use none."""
    layout_fingerprint: str = ""
    """Fingerprint of the layout of the group's KV; empty if it is unknown, in which case all groups have the same
    layout."""

    @property
    def incarnation(self) -> Hashable:
        """Return the identity of this incarnation of the group. It changes when the group is repaired."""
        return self.name, self.endpoints, self.epoch


@dataclass(frozen=True)
class GenerationGroup:
    """Generation group: the slots of one engine, and the batch of sequences that it decodes."""

    name: str
    endpoint: str
    layout_fingerprint: str
    """Fingerprint of the KV layout that the group accepts."""
    num_slots: int
    max_slot_tokens: int
    """Maximum number of tokens per slot, prompt and output together."""
    ready: bool = True
    prefix_store: str = ""
    """Name of the prefix store from which slots load cached prefixes and in which answers are stored; empty if there is
    none."""
    residency: str = ""
    """Name of the group's residency policy, which decides where KV is stored and to which part of it sequences
    attend."""
    is_approximate: bool = False
    """True if the group's sequences attend to only a part of their tokens."""

    def may_serve(self, *, exact: bool) -> bool:
        """Return True if the group may serve a request. `exact` is True if the request needs attention to all
        tokens."""
        return not (exact and self.is_approximate)

    @property
    def incarnation(self) -> Hashable:
        """Return the identity of this incarnation of the group. It changes when the group is replaced."""
        return self.name, self.endpoint


def endpoints_of(incarnation: Hashable) -> tuple[str, tuple[str, ...]]:
    """Return the role of a group and the endpoints of its workers, given the group's `incarnation`."""
    assert isinstance(incarnation, tuple), f"{incarnation} is not the incarnation of a group"
    endpoints = incarnation[1]
    return ("generate", (endpoints,)) if isinstance(endpoints, str) else ("prefill", endpoints)


Group = PrefillGroup | GenerationGroup
G = TypeVar("G", PrefillGroup, GenerationGroup)


@dataclass(frozen=True)
class AbsentGroup:
    """Known group that has no workers at present."""

    name: str
    role: str
    """The group's role: prefill or generate."""
    starts: bool = False
    """True if the group's workers are to be started; False if the group has left by an operator's order."""
    error: str = ""
    """Reason why the group's last start failed, in one line; empty if it did not fail. The start is retried."""


@dataclass(frozen=True)
class EndedWorker:
    """A worker whose process has ended."""

    endpoint: str
    """host:port on which the worker served."""
    computing: tuple[str, ...] = ()
    """Fingerprints of the requests whose first tokens the worker was computing when it crashed; empty if it did not
    crash."""


@dataclass(frozen=True)
class ClusterView:
    """All known groups, with and without workers. A group that is being repaired is included with `ready` False."""

    prefill: tuple[PrefillGroup, ...] = ()
    generation: tuple[GenerationGroup, ...] = ()
    absent: tuple[AbsentGroup, ...] = ()
    ended: tuple[EndedWorker, ...] = ()
    """Workers whose processes have ended recently, the latest last."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots of all generation groups."""
        return sum(group.num_slots for group in self.generation)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return all groups that have workers, of both roles."""
        return (*self.prefill, *self.generation)

    def chains_for(self, generation: GenerationGroup) -> "ClusterView":
        """Return this view with only the prefill groups whose KV layout the generation group accepts. Layouts may
        differ while the model of a cluster is being changed."""
        layouts = ("", generation.layout_fingerprint)
        return replace(self, prefill=tuple(group for group in self.prefill if group.layout_fingerprint in layouts))

    @property
    def endpoints(self) -> frozenset[str]:
        """Return the endpoints of all workers."""
        ranks = (endpoint for group in self.prefill for endpoint in group.endpoints)
        return frozenset((*ranks, *(group.endpoint for group in self.generation)))


@dataclass(frozen=True)
class Orders:
    """Operators' orders for groups, with or without workers. The orchestrator changes the orders. The supervisor
    carries them out, and stores them for a restart of either process."""

    drained: frozenset[str] = frozenset()
    """Names of groups that get no new work."""
    leaving: frozenset[str] = frozenset()
    """Names of drained, idle groups whose workers are to be stopped."""
    stand_ins: frozenset[str] = frozenset()
    """Names of stand-ins, i.e. groups that were started in addition to the configured ones. A stand-in that has left is
    deleted."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Folder of the model that a group loads at its next start, by group name. Groups that are absent load the
    configured model."""
    lent: Mapping[str, str] = field(default_factory=dict)
    """Worker that a stand-in has borrowed from a group of the other role, by the stand-in's name. The worker returns to
    its own group when the stand-in leaves."""

    surplus: frozenset[str] = frozenset()
    """Names of groups that the autoscaler has drained because fewer groups suffice. It may undrain them."""

    def without(self, names: Collection[str]) -> "Orders":
        """Return these orders without the orders for the groups in `names`."""
        models = {name: model for name, model in self.models.items() if name not in names}
        lent = {name: worker for name, worker in self.lent.items() if name not in names}
        kept = (each - {*names} for each in (self.drained, self.leaving, self.stand_ins, self.surplus))
        drained, leaving, stand_ins, surplus = kept
        return Orders(drained, leaving, stand_ins, models, lent, surplus)

    def lender(self, name: str) -> str:
        """Return the name of the group from which group `name` has borrowed its worker; empty if it has borrowed
        none."""
        return place_of(self.lent[name])[0] if name in self.lent else ""

    def borrowers(self, name: str) -> dict[int, str]:
        """Return the names of the groups that have borrowed workers of group `name`, by the rank of the worker in that
        group."""
        places = {borrower: place_of(worker) for borrower, worker in self.lent.items()}
        return {rank: borrower for borrower, (group, rank) in places.items() if group == name}


def role_of(group: str) -> str:
    """Return the role of the group of that name, for example prefill for prefill-0."""
    return group.partition("-")[0]


def place_of(worker: str) -> tuple[str, int]:
    """Return the group name and the rank of the worker of that name, for example of prefill-0.1 or generate-0."""
    group, _, rank = worker.partition(".")
    return group, int(rank or 0)

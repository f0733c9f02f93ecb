"""Groups of a cluster as the supervisor reports them, and the operators' orders for these groups.

Made by `deploy.groups.cluster`; stored by `orchestrator.membership.members`. Does no I/O.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from baton.planning.device_profile import DeviceProfile
from baton.types import Epoch


@dataclass(frozen=True)
class PrefillGroup:
    """Prefill group: a chain of ranks that are linked to each other. When the links are replaced, a new PrefillGroup
    with another `epoch` is created."""

    name: str
    endpoints: tuple[str, ...]
    """Addresses (host:port) of the ranks, in rank order."""
    epoch: Epoch
    ready: bool = True
    prefix_store: str = ""
    """Name of the prefix store that the ranks use; empty if they use none. Other groups of either role may use the same
    store."""
    layout_fingerprint: str = ""
    """Fingerprint of the layout of the group's KV. Empty if it is unknown; the layout is then assumed to match every
    generation group."""
    profile: DeviceProfile | None = None
    """Profile of the device of the group's slowest rank. None if no rank has reported its profile."""

    @property
    def incarnation(self) -> Hashable:
        """Return a key that identifies this incarnation of the group. The key changes when the group is repaired."""
        return self.name, self.endpoints, self.epoch


@dataclass(frozen=True)
class GenerationGroup:
    """Generation group: one engine that decodes a batch of sequences. Each sequence occupies a slot."""

    name: str
    endpoint: str
    layout_fingerprint: str
    """Fingerprint of the KV layout that the group accepts."""
    num_slots: int
    max_slot_tokens: int
    """Maximum number of tokens of a sequence, including its prompt and its output."""
    ready: bool = True
    prefix_store: str = ""
    """Name of the group's prefix store. Slots load cached prefixes from the store, and answers are stored in it. Empty
    if the group has no store."""
    residency: str = ""
    """Name of the group's residency policy. The policy decides where KV is stored, and which of the KV each sequence
    attends to."""
    is_approximate: bool = False
    """True if the group's sequences attend to only a part of their tokens."""
    profile: DeviceProfile | None = None
    """Profile of the engine's device. None if the engine has not reported it."""

    def may_serve(self, *, exact: bool) -> bool:
        """Return True if the group may serve a request. `exact` is True if the request requires attention to all its
        tokens."""
        return not (exact and self.is_approximate)

    @property
    def incarnation(self) -> Hashable:
        """Return a key that identifies this incarnation of the group. The key changes when the group is replaced."""
        return self.name, self.endpoint


def endpoints_of(incarnation: Hashable) -> tuple[str, tuple[str, ...]]:
    """Return the role of a group and the endpoints (host:port) of its workers. `incarnation` is the key that
    `PrefillGroup.incarnation` or `GenerationGroup.incarnation` returned for the group."""
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
    """True if the group's workers will be started. False if an operator has ordered the group to stop."""
    error: str = ""
    """Error of the group's last start, in one line; empty if the start did not fail. A failed start is retried."""


@dataclass(frozen=True)
class EndedWorker:
    """Worker whose process has ended."""

    endpoint: str
    """Address (host:port) on which the worker served."""
    computing: tuple[str, ...] = ()
    """Fingerprints of the requests whose first tokens the worker was computing when it crashed. Empty if the worker did
    not crash."""


@dataclass(frozen=True)
class ClusterView:
    """View of all known groups, with and without workers. A group that is being repaired is included with `ready`
    False."""

    prefill: tuple[PrefillGroup, ...] = ()
    generation: tuple[GenerationGroup, ...] = ()
    absent: tuple[AbsentGroup, ...] = ()
    ended: tuple[EndedWorker, ...] = ()
    """Workers whose processes have ended recently, in the order of their ends."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots of all generation groups."""
        return sum(group.num_slots for group in self.generation)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return all groups that have workers, of both roles."""
        return (*self.prefill, *self.generation)

    def chains_for(self, generation: GenerationGroup) -> "ClusterView":
        """Return this view with only those prefill groups whose KV layout the group `generation` accepts. Prefill
        groups with an unknown layout are included. Layouts may differ while the model of a cluster is being changed."""
        layouts = ("", generation.layout_fingerprint)
        return replace(self, prefill=tuple(group for group in self.prefill if group.layout_fingerprint in layouts))

    @property
    def endpoints(self) -> frozenset[str]:
        """Return the endpoints (host:port) of all workers."""
        ranks = (endpoint for group in self.prefill for endpoint in group.endpoints)
        return frozenset((*ranks, *(group.endpoint for group in self.generation)))


@dataclass(frozen=True)
class Orders:
    """Operators' orders for groups, with or without workers. The orchestrator changes the orders. The supervisor
    carries them out, and stores them so that a restart of either process does not lose them."""

    drained: frozenset[str] = frozenset()
    """Names of groups that get no new work."""
    leaving: frozenset[str] = frozenset()
    """Names of drained, idle groups whose workers must be stopped."""
    stand_ins: frozenset[str] = frozenset()
    """Names of stand-ins, i.e. groups that were started in addition to the configured ones. A stand-in is deleted when
    its workers have stopped."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Folder of the model that a group loads at its next start, by group name. A group without an entry loads the
    configured model."""
    lent: Mapping[str, str] = field(default_factory=dict)
    """Names of borrowed workers. The key is the name of the borrower, a stand-in (additional group) that runs on this
    one worker. The worker belongs to a group of the other role, and returns to that group when the stand-in stops."""

    surplus: frozenset[str] = frozenset()
    """Names of groups that the autoscaler has drained because fewer groups suffice. The autoscaler may undrain them."""

    def without(self, names: Collection[str]) -> "Orders":
        """Return these orders without the orders for the groups in `names`."""
        models = {name: model for name, model in self.models.items() if name not in names}
        lent = {name: worker for name, worker in self.lent.items() if name not in names}
        kept = (each - {*names} for each in (self.drained, self.leaving, self.stand_ins, self.surplus))
        drained, leaving, stand_ins, surplus = kept
        return Orders(drained, leaving, stand_ins, models, lent, surplus)

    def lender(self, name: str) -> str:
        """Return the name of the group from which the group `name` has borrowed its worker. Return an empty string if
        its worker is not borrowed."""
        return place_of(self.lent[name])[0] if name in self.lent else ""

    def borrowers(self, name: str) -> dict[int, str]:
        """Return the names of the groups that have borrowed workers of the group `name`. The keys are the ranks that
        the workers have in the group `name`."""
        places = {borrower: place_of(worker) for borrower, worker in self.lent.items()}
        return {rank: borrower for borrower, (group, rank) in places.items() if group == name}


def role_of(group: str) -> str:
    """Return the role in a group's name: for example, "prefill" for prefill-0."""
    return group.partition("-")[0]


def place_of(worker: str) -> tuple[str, int]:
    """Return the group name and the rank of the worker with this name. For example, prefill-0.1 is rank 1 of the group
    prefill-0. A name without a rank, such as generate-0, has rank 0."""
    group, _, rank = worker.partition(".")
    return group, int(rank or 0)

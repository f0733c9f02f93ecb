"""Traits of all residency policies, by their names in the configuration. The configuration, `baton doctor` and `baton
evaluate` use them, so this module does not import torch. `policies` makes the policies, and each policy's class refers
to its traits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class PolicyTraits:
    """Properties of a residency policy that are needed to choose it before it is made."""

    name: str
    is_exact: bool = False
    """True if every token attends to all tokens before it, with their KV as it was computed."""
    sizes: tuple[str, ...] = ()
    """Options of `baton evaluate` that set the number of keys that a sequence attends to: budget, alpha. Empty: a
    sequence attends to all keys."""
    needs_basis: bool = False
    """True if keys are selected with the basis that `baton prepare` fitted."""
    has_pool: bool = False
    """True if a sequence may keep its KV in a pool of `pool_tokens` tokens, which evicts."""

    @property
    def chooses_keys(self) -> bool:
        """Return whether sequences attend only to some keys, the number of which `baton prepare` has tuned."""
        return bool(self.sizes)


POLICIES: Mapping[str, PolicyTraits] = {
    traits.name: traits
    for traits in (
        PolicyTraits("device", is_exact=True),
        PolicyTraits("host", is_exact=True),
        PolicyTraits("infinigen", sizes=("budget", "alpha"), needs_basis=True, has_pool=True),
        PolicyTraits("infinigen_int4", sizes=("budget", "alpha"), needs_basis=True),
        PolicyTraits("int4"),
    )
}
POOLED = ", ".join(name for name, traits in POLICIES.items() if traits.has_pool)
"""Names of the policies that may keep KV in a pool, as text for messages."""


def policy_named(name: str, policies: Mapping[str, T]) -> T:
    """Return the entry of `policies` for the policy `name`, which is its traits or its maker. Raises ConfigError for an
    unknown name."""
    if name not in policies:
        raise ConfigError(f"residency = {name!r} is unknown: use one of {', '.join(policies)}")
    return policies[name]

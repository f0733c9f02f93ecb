"""Properties (traits) of all residency policies, by the policies' names in the configuration.

The configuration, `baton doctor` and `baton evaluate` need the properties without torch, so this module does not import
torch. The module `policies` makes the policies, and each policy's class refers to its traits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class PolicyTraits:
    """Properties of a residency policy that must be known before the policy is made."""

    name: str
    is_exact: bool = False
    """True if every token attends to all earlier tokens, and their KV is stored without loss."""
    sizes: tuple[str, ...] = ()
    """Names of the options of `baton evaluate` (budget, alpha) that set the number of keys that a sequence attends to.
    Empty: a sequence attends to all keys."""
    needs_basis: bool = False
    """True if keys are selected with the basis (a projection of keys to few columns) that `baton prepare` fitted."""
    has_pool: bool = False
    """True if the policy supports a pool, which keeps at most `pool_tokens` tokens per sequence and evicts others."""

    @property
    def chooses_keys(self) -> bool:
        """Return True if sequences attend only to some keys. `baton prepare` has then tuned the number of keys."""
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
"""Comma-separated names of the policies that support a pool (a limit on the tokens whose KV a sequence keeps). Used in
messages."""


def policy_named(name: str, policies: Mapping[str, T]) -> T:
    """Return the value of `policies` for the policy `name`, such as the policy's traits. Raises ConfigError if the name
    is unknown."""
    if name not in policies:
        raise ConfigError(f"residency = {name!r} is unknown: use one of {', '.join(policies)}")
    return policies[name]

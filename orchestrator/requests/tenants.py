"""Finds the tenant that a call belongs to, and says what each tenant may have: keys, a weight, bounds.

A call says who sends it in its gRPC metadata: by an API key (`authorization: Bearer KEY`, or `x-api-key: KEY`), or,
where a trusted gateway in front has checked already, by the tenant's name (`baton-tenant: NAME`). Operators, who may
change the cluster, have keys of their own (`orchestrator.api.access` says for which methods). Only the hashes of keys
are held here. Used by `orchestrator.api`; `orchestrator.admission` applies weights and bounds. Pure; read-only once
made.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.errors import ConfigError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError

AUTHORIZATION_KEY = "authorization"
API_KEY_KEY = "x-api-key"
TENANT_KEY = "baton-tenant"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LEAST_WEIGHT, _MOST_WEIGHT = 0.1, 1000.0

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Tenant:
    """One of the users that share the queue. Raises ConfigError on a bad field."""

    name: str
    weight: float = 1.0
    """Prompt tokens that are served for this tenant while others wait, per prompt token of a tenant of weight 1."""
    max_queued: int = 0
    """Largest number of the tenant's requests that may wait; 0: as many as the queue holds."""
    max_queued_tokens: int = 0
    """Largest number of the tenant's prompt tokens that may wait; 0: as many as the queue holds."""
    max_running: int = 0
    """Largest number of choices of the tenant's requests that may run at once; 0: as many as there are slots."""
    key_hashes: tuple[str, ...] = ()
    """SHA-256 of the tenant's API keys, in hexadecimal; a tenant with any is reached by these keys only."""

    def __post_init__(self) -> None:
        self._require(_NAME.fullmatch(self.name) is not None, "name", "use 1 to 40 letters, digits, - and _")
        within = _LEAST_WEIGHT <= self.weight <= _MOST_WEIGHT
        self._require(within, "weight", f"use a number from {_LEAST_WEIGHT:g} to {_MOST_WEIGHT:g}")
        for bound in ("max_queued", "max_queued_tokens", "max_running"):
            self._require(getattr(self, bound) >= 0, bound, "use 0 (no bound of its own) or more")
        if not all(_HASH.fullmatch(key_hash) for key_hash in self.key_hashes):  # it may be a key: not shown
            raise ConfigError(f"tenant {self.name!r}: key_hashes: use 64 hexadecimal digits each, as sha256sum prints")

    def _require(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            raise ConfigError(f"tenant {self.name!r}: {name} = {getattr(self, name)!r} is out of range: {remedy}")


DEFAULT_TENANT = Tenant("default")
"""The tenant of calls that do not say who sends them."""


def hash_key(api_key: str) -> str:
    """Return the SHA-256 of an API key in hexadecimal, as `Tenant.key_hashes` holds it."""
    return hashlib.sha256(api_key.encode()).hexdigest()


def values_of(metadata: Metadata) -> dict[str, str]:
    """Return a call's metadata by key, as text."""
    return {key: value.decode(errors="replace") if isinstance(value, bytes) else value for key, value in metadata}


class Tenants:
    """Finds the tenant of a call by its metadata, and tells operators apart."""

    def __init__(
        self,
        tenants: Sequence[Tenant] = (),
        *,
        trust_metadata: bool = False,
        require_key: bool = False,
        operator_hashes: Sequence[str] = (),
    ) -> None:
        """Index the tenants and the operators' keys.

        `trust_metadata`: whether a call without a key may name its tenant. `require_key`: whether a call that has
        neither a key nor such a name is refused. `operator_hashes`: SHA-256 of operators' keys, in hexadecimal. Raises
        ConfigError for tenants that cannot be told apart, and for required keys where no tenant or operator has one.
        """
        self._by_name = {tenant.name: tenant for tenant in (DEFAULT_TENANT, *tenants)}
        self._by_hash = {key_hash.encode(): tenant for tenant in tenants for key_hash in tenant.key_hashes}
        self._operator_hashes = tuple(each.encode() for each in operator_hashes)
        self._trust_metadata = trust_metadata
        self._require_key = require_key
        names = [tenant.name for tenant in tenants]
        if len(set(names)) < len(names):
            raise ConfigError(f"tenants {', '.join(sorted(names))}: one is named twice: give each a name of its own")
        if not all(_HASH.fullmatch(each) for each in operator_hashes):
            raise ConfigError("operator_keys: use 64 hexadecimal digits each, as sha256sum prints")
        if len(self._by_hash) < sum(len(tenant.key_hashes) for tenant in tenants):
            raise ConfigError("two tenants, or one twice, have the same API key: give each key to one tenant")
        if not self._by_hash.keys().isdisjoint(self._operator_hashes):
            raise ConfigError("operator_keys: one is a tenant's API key, too: give operators keys of their own")
        if require_key and not (self._by_hash or self._operator_hashes):
            raise ConfigError("require_api_key = True, and no tenant has a key: give one, or do not require it")

    @property
    def requires_key(self) -> bool:
        """Return whether each call must name its tenant, by a key or by a trusted name."""
        return self._require_key

    @property
    def has_operators(self) -> bool:
        """Return whether there are operators' keys."""
        return bool(self._operator_hashes)

    @property
    def goes_by_keys(self) -> bool:
        """Return whether only a key identifies an operator, and a call from this machine does not.

        This holds where operators have keys, where calls must have a key, and behind a gateway that is trusted with
        names.
        """
        return self.has_operators or self._require_key or self._trust_metadata

    def is_operator(self, metadata: Metadata) -> bool:
        """Return whether a call with this metadata has an operator's key.

        Returns False without a key, and where no key is configured. Raises PermissionDeniedError for a tenant's key,
        and UnauthenticatedError for an unknown key.
        """
        key = _key_of(values_of(metadata))
        if key is None or not (self._by_hash or self._operator_hashes):
            return False
        if self._is_operators(key):
            return True
        tenant = self._of_key(key)
        raise PermissionDeniedError(f"the API key is tenant {tenant.name}'s: use an operator's key for this")

    def of(self, metadata: Metadata) -> Tenant:
        """Return the tenant of a call with this metadata; an operator's calls belong to the default tenant.

        Raises UnauthenticatedError for a key that is unknown, or missing where one is required, and
        InvalidArgumentError for a malformed name.
        """
        values = values_of(metadata)
        key = _key_of(values)
        if key is not None and self._is_operators(key):
            return self._by_name[DEFAULT_TENANT.name]
        if key is not None and self._by_hash:
            return self._of_key(key)
        name = values.get(TENANT_KEY)
        if name is not None and self._trust_metadata:
            return self._of_name(name)
        if self._require_key:
            raise UnauthenticatedError(f"the call has no API key: send {AUTHORIZATION_KEY}: Bearer KEY as metadata")
        return self._by_name[DEFAULT_TENANT.name]

    def _is_operators(self, key: str) -> bool:
        """Return whether a key is an operator's. Compares with every hash, in a time that depends on none of them."""
        presented = hash_key(key).encode()
        matches = [hmac.compare_digest(known, presented) for known in self._operator_hashes]
        return True in matches

    def _of_key(self, key: str) -> Tenant:
        """Return a key's tenant. Compares with every hash, in a time that depends on none of them."""
        presented, found = hash_key(key).encode(), None
        for known, tenant in self._by_hash.items():
            if hmac.compare_digest(known, presented):
                found = tenant
        if found is None:
            raise UnauthenticatedError("the API key is unknown here: check it, or ask the operator for one")
        return found

    def _of_name(self, name: str) -> Tenant:
        """Return the tenant of this name; a name that is not configured gets weight 1 and no bounds of its own."""
        if _NAME.fullmatch(name) is None:
            raise InvalidArgumentError(
                f"metadata {TENANT_KEY} = {name[:60]!r} is no name: use 1 to 40 letters, digits, - and _"
            )
        tenant = self._by_name.get(name) or Tenant(name)
        if tenant.key_hashes:
            raise UnauthenticatedError(f"tenant {name!r} is reached by its API key only: send the key, not the name")
        return tenant


def _key_of(values: dict[str, str]) -> str | None:
    scheme, _, key = values.get(AUTHORIZATION_KEY, "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return values.get(API_KEY_KEY)

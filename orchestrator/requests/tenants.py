"""Identifies the tenant of a call, and holds the settings of each tenant: API keys, a weight and limits.

The gRPC metadata of a call identifies its sender by an API key (`authorization: Bearer KEY`, or `x-api-key: KEY`). If a
trusted gateway has already checked the key, the metadata has the tenant's name instead (`baton-tenant: NAME`).
Operators have separate keys (`orchestrator.api.access`). Only the hashes of keys are stored. Used by
`orchestrator.api`; weights and limits are applied by `orchestrator.admission`. Does no I/O. Read-only after
construction.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, field
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, Field

from baton.errors import ConfigError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError
from baton.settings.base import settings

AUTHORIZATION_KEY = "authorization"
API_KEY_KEY = "x-api-key"
TENANT_KEY = "baton-tenant"
_NAME = r"^[A-Za-z0-9_-]{1,40}$"

Metadata = Iterable[tuple[str, str | bytes]]


def _checked_hash(key_hash: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", key_hash):  # not shown in the message, because it may be a key
        raise ValueError("use 64 hexadecimal digits each, as sha256sum prints")
    return key_hash


TenantName = Annotated[str, Field(pattern=_NAME)]
KeyHash = Annotated[str, AfterValidator(_checked_hash)]
"""SHA-256 of an API key, in hexadecimal."""


@settings
class TenantLimits:
    """Limits of a tenant, which shares the queue with other tenants."""

    _: KW_ONLY
    weight: Annotated[float, Field(ge=0.1, le=1000)] = 1.0
    """Weight of the tenant while several tenants wait. Prompt tokens are served in proportion to the weights."""
    max_queued_requests: Annotated[int, Field(ge=0)] = 0
    """Maximum number of the tenant's waiting requests; 0: only the limit of the whole queue applies."""
    max_queued_tokens: Annotated[int, Field(ge=0)] = 0
    """Maximum total number of prompt tokens of the tenant's waiting requests; 0: only the queue's limit applies."""
    max_running: Annotated[int, Field(ge=0)] = 0
    """Maximum number of the tenant's choices that run at the same time; 0: limited only by the number of slots."""


@settings
class Tenant(TenantLimits):
    """Tenant: one of the users or applications that share the queue."""

    name: TenantName
    key_hashes: tuple[KeyHash, ...] = field(default=(), kw_only=True)
    """Hashes of the tenant's API keys. If at least one is configured, a call belongs to this tenant only if it has one
    of these keys. The tenant's name in the metadata is then refused, even from a trusted gateway."""


DEFAULT_TENANT = Tenant("default")
"""Tenant of calls that do not identify a tenant."""


def hash_key(api_key: str) -> str:
    """Return the SHA-256 hash of an API key in hexadecimal, the format of `Tenant.key_hashes`."""
    return hashlib.sha256(api_key.encode()).hexdigest()


def values_of(metadata: Metadata) -> dict[str, str]:
    """Return the metadata of a call as a dictionary of strings. Binary values are decoded as UTF-8."""
    return {key: value.decode(errors="replace") if isinstance(value, bytes) else value for key, value in metadata}


@settings
class Tenants:
    """Identifies the tenant, or the operator, that sent a call, from the call's metadata.

    Raises ConfigError if two tenants have the same name, if two tenants or operators have the same key, or if keys are
    required but none is configured.
    """

    tenants: tuple[Tenant, ...] = ()
    _: KW_ONLY
    trust_metadata: bool = False
    """True if the tenant's name in a call's metadata is trusted. It is used only for calls without an API key."""
    require_key: bool = False
    """True if calls that have neither an API key nor a trusted tenant name are refused."""
    operator_hashes: tuple[KeyHash, ...] = ()
    """SHA-256 hashes of the operators' API keys."""

    def __post_init__(self) -> None:
        if len({tenant.name for tenant in self.tenants}) < len(self.tenants):
            names = ", ".join(sorted(tenant.name for tenant in self.tenants))
            raise ConfigError(f"tenants {names}: one is named twice: give each a name of its own")
        if len(self._by_hash) < sum(len(tenant.key_hashes) for tenant in self.tenants):
            raise ConfigError("two tenants, or one twice, have the same API key: give each key to one tenant")
        if not self._by_hash.keys().isdisjoint(self._operators):
            raise ConfigError("operator_keys: one is a tenant's API key, too: give operators keys of their own")
        if self.require_key and not (self._by_hash or self._operators):
            raise ConfigError("require_api_key = True, and no tenant has a key: give one, or do not require it")

    @cached_property
    def _by_name(self) -> Mapping[str, Tenant]:
        return {tenant.name: tenant for tenant in (DEFAULT_TENANT, *self.tenants)}

    @cached_property
    def _by_hash(self) -> Mapping[bytes, Tenant]:
        return {key_hash.encode(): tenant for tenant in self.tenants for key_hash in tenant.key_hashes}

    @cached_property
    def _operators(self) -> tuple[bytes, ...]:
        return tuple(each.encode() for each in self.operator_hashes)

    def is_operator(self, metadata: Metadata) -> bool:
        """Return True if a call with this metadata has an operator's key.

        Returns False if the call has no key, or if no keys are configured. Raises PermissionDeniedError for a tenant's
        key, and UnauthenticatedError for an unknown key.
        """
        key = _key_of(values_of(metadata))
        if key is None or not (self._by_hash or self._operators):
            return False
        if self._is_operators(key):
            return True
        tenant = self._of_key(key)
        raise PermissionDeniedError(f"the API key is tenant {tenant.name}'s: use an operator's key for this")

    def of(self, metadata: Metadata) -> Tenant:
        """Return the tenant of a call with this metadata. Calls with an operator's key belong to the default tenant.

        Raises UnauthenticatedError if the key is unknown, or if a key is required and missing, and InvalidArgumentError
        if the tenant's name is malformed.
        """
        values = values_of(metadata)
        key = _key_of(values)
        if key is not None and self._is_operators(key):
            return self._by_name[DEFAULT_TENANT.name]
        if key is not None and self._by_hash:
            return self._of_key(key)
        name = values.get(TENANT_KEY)
        if name is not None and self.trust_metadata:
            return self._of_name(name)
        if self.require_key:
            raise UnauthenticatedError(f"the call has no API key: send {AUTHORIZATION_KEY}: Bearer KEY as metadata")
        return self._by_name[DEFAULT_TENANT.name]

    def viewer_of(self, metadata: Metadata) -> str | None:
        """Return the name of the tenant whose request ids the caller may see. Return None for an operator, who may see
        all ids.

        Raises UnauthenticatedError and InvalidArgumentError in the same cases as `of`.
        """
        key = _key_of(values_of(metadata))
        return None if key is not None and self._is_operators(key) else self.of(metadata).name

    def _is_operators(self, key: str) -> bool:
        """Return True if the key is an operator's. The key is compared with all hashes in constant time."""
        presented = hash_key(key).encode()
        matches = [hmac.compare_digest(known, presented) for known in self._operators]
        return True in matches

    def _of_key(self, key: str) -> Tenant:
        """Return the tenant of a key. The key is compared with all hashes in constant time."""
        presented, found = hash_key(key).encode(), None
        for known, tenant in self._by_hash.items():
            if hmac.compare_digest(known, presented):
                found = tenant
        if found is None:
            raise UnauthenticatedError("the API key is unknown here: check it, or request one from the operator")
        return found

    def _of_name(self, name: str) -> Tenant:
        """Return the tenant of this name. A name that is not configured gets weight 1 and no limits."""
        if re.fullmatch(_NAME, name) is None:
            raise InvalidArgumentError(
                f"metadata {TENANT_KEY} = {name[:60]!r} is not a name: use 1 to 40 letters, digits, - and _"
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

"""Who a call belongs to, by key or by name, and what is refused."""

from typing import Any

import pytest

from baton.errors import (
    BatonError,
    ConfigError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from orchestrator.requests.tenants import Tenant, Tenants, hash_key

ACME = Tenant("acme", weight=3.0, key_hashes=(hash_key("acme-1"), hash_key("acme-2")))
OPEN = Tenant("open", max_queued_requests=4)
TENANTS = (ACME, OPEN)


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ((), "default"),
        ((("authorization", "Bearer acme-1"),), "acme"),
        ((("authorization", "bearer  acme-2 "),), "acme"),
        ((("x-api-key", "acme-2"),), "acme"),
        ((("authorization", "Basic dXNlcg=="), ("x-api-key", "acme-1")), "acme"),
        ((("baton-tenant", "open"),), "default"),  # whoever may say so is not trusted
        ((("user-agent", b"\xff"),), "default"),
    ],
)
def test_a_call_is_its_keys_tenants(metadata: tuple[tuple[str, str | bytes], ...], name: str) -> None:
    assert Tenants(TENANTS).of(metadata).name == name


def test_a_trusted_name_is_taken_and_a_key_counts_more() -> None:
    tenants = Tenants(TENANTS, trust_metadata=True)
    assert tenants.of((("baton-tenant", "open"),)) is OPEN
    assert tenants.of((("baton-tenant", "new-one"),)) == Tenant("new-one")
    assert tenants.of((("baton-tenant", "open"), ("x-api-key", "acme-1"))) is ACME


def test_the_default_tenant_may_be_configured() -> None:
    limited = Tenant("default", max_running=2)
    assert Tenants((limited,)).of(()) is limited


OPERATED = Tenants(TENANTS, operator_hashes=(hash_key("operator-1"), hash_key("operator-2")))


def test_an_operator_is_known_by_a_key_and_asks_as_the_default_tenant() -> None:
    for key in ("operator-1", "operator-2"):
        assert OPERATED.is_operator((("x-api-key", key),))
        assert OPERATED.of((("x-api-key", key),)).name == "default"
    assert not OPERATED.is_operator(())
    assert not Tenants((OPEN,)).is_operator((("authorization", "Bearer of-a-proxy"),))


def test_no_other_key_is_an_operators() -> None:
    with pytest.raises(PermissionDeniedError, match="the API key is tenant acme's"):
        OPERATED.is_operator((("x-api-key", "acme-1"),))
    with pytest.raises(UnauthenticatedError, match="the API key is unknown here"):
        OPERATED.is_operator((("x-api-key", "operator-3"),))


@pytest.mark.parametrize(
    ("hashes", "text"),
    [(("secret",), "operator_hashes.0: use 64"), ((hash_key("acme-2"),), "operator_keys: one is a tenant's")],
)
def test_bad_keys_of_operators_are_refused(hashes: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        Tenants(TENANTS, operator_hashes=hashes)
    assert "secret" not in str(refused.value)


def test_keys_mean_nothing_where_nobody_has_one() -> None:
    assert Tenants((OPEN,)).of((("authorization", "Bearer of-a-proxy"),)).name == "default"


@pytest.mark.parametrize(
    ("metadata", "kind", "text"),
    [
        ((("x-api-key", "wrong"),), UnauthenticatedError, "the API key is unknown here"),
        ((("x-api-key", ""),), UnauthenticatedError, "the API key is unknown here"),
        ((), UnauthenticatedError, "the call has no API key: send authorization: Bearer KEY"),
        ((("baton-tenant", "acme"),), UnauthenticatedError, "tenant 'acme' is reached by its API key only"),
        ((("baton-tenant", "a b"),), InvalidArgumentError, "metadata baton-tenant = 'a b' is not a name"),
    ],
)
def test_what_is_refused(metadata: tuple[tuple[str, str]], kind: type[BatonError], text: str) -> None:
    with pytest.raises(kind, match=text):
        Tenants(TENANTS, trust_metadata=True, require_key=True).of(metadata)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "a b"}, "name = 'a b' is wrong: string should match pattern"),
        ({"weight": 0.0}, "weight = 0.0 is wrong: input should be greater than or equal to 0.1"),
        ({"weight": float("nan")}, "weight = nan"),
        ({"max_running": -1}, "max_running = -1 is wrong: input should be greater than or equal to 0"),
        ({"key_hashes": ("secret",)}, "key_hashes.0: use 64 hexadecimal digits each"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Tenant(**{"name": "t", **fields})


@pytest.mark.parametrize(
    ("tenants", "require_key", "text"),
    [
        ((OPEN, OPEN), False, "tenants open, open: one is named twice"),
        ((ACME, Tenant("other", key_hashes=ACME.key_hashes[:1])), False, "have the same API key"),
        ((OPEN,), True, "require_api_key = True, and no tenant has a key"),
    ],
)
def test_tenants_must_be_told_apart(tenants: tuple[Tenant, ...], require_key: bool, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Tenants(tenants, require_key=require_key)

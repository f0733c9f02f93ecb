"""Who may call what: every method of every service on the clients' port, by every kind of caller."""

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from baton.errors import PermissionDeniedError, UnauthenticatedError
from baton.transport.channel import make_channel
from orchestrator.api.access import METHODS, AllowedCallers, check_access
from orchestrator.membership.members import Membership
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.clients import start_orchestrator
from tests.support.models.tiny_models import random_decoder
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

ACME = Tenant("acme", key_hashes=(hash_key("acme-key"),))
OPERATORS = (hash_key("operator-key"),)
KEYS = {"no key": None, "a tenant's key": "acme-key", "an operator's key": "operator-key", "a wrong key": "wrong"}
PASSED, UNKNOWN, DENIED = "passed", grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
CONFIGS = {
    "keys required": Tenants((ACME,), require_key=True, operator_hashes=OPERATORS),
    "operators have keys": Tenants((ACME,), operator_hashes=OPERATORS),
    "tenants have keys": Tenants((ACME,)),
    "a gateway's word is taken": Tenants((ACME,), trust_metadata=True),
    "no keys": Tenants(),
}
OPEN = ("Check", "Watch", "List")
OPERATED = ("Drain", "Undrain", "StandIn", "Flip", "GetTrace")
IDENTIFYING = ("Generate", "GetRequests")

Outcome = str | grpc.StatusCode


def expected(config: str, method: MethodDescriptor, key: str, is_member: bool) -> Outcome:
    """docs/security.md, "Who may call what", in other words."""
    if method.name in OPEN:
        return PASSED
    if method.name in OPERATED:
        return _expected_of_operation(config, key, is_member)
    if config == "keys required":
        return UNKNOWN if key in ("no key", "a wrong key") else PASSED
    # These look at keys by themselves, where tenants have any; all else is for everybody.
    is_unknown = key == "a wrong key" or (key == "an operator's key" and config != "operators have keys")
    return UNKNOWN if method.name in IDENTIFYING and config != "no keys" and is_unknown else PASSED


def _expected_of_operation(config: str, key: str, is_member: bool) -> Outcome:
    if config == "no keys":
        return PASSED if is_member else UNKNOWN
    if key == "a tenant's key":
        return DENIED
    has_operators = config in ("keys required", "operators have keys")
    if key == "a wrong key" or (key == "an operator's key" and not has_operators):
        return UNKNOWN
    return PASSED if is_member and (key == "an operator's key" or not has_operators) else UNKNOWN


@asynccontextmanager
async def serving(tenants: Tenants) -> AsyncIterator[int]:
    """Run an orchestrator, and yield its port."""
    config = OrchestratorConfig(tenants=tenants)
    server = await start_orchestrator(random_decoder(), Membership(), config, max_tokens=400)
    try:
        yield server.port
    finally:
        await server.stop()


async def services(channel: grpc.aio.Channel) -> list[str]:
    """All that are on the port, as reflection says."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([ask]), metadata=bearing("operator-key")
    )
    async for reply in call:
        return [service.name for service in reply.list_services_response.service]
    raise AssertionError("reflection says nothing")


def methods(names: Sequence[str]) -> Iterator[MethodDescriptor]:
    for name in names:
        yield from descriptor_pool.Default().FindServiceByName(name).methods


def bearing(key: str | None) -> tuple[tuple[str, str], ...]:
    return () if key is None else (("authorization", f"Bearer {key}"),)


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def outcome(channel: grpc.aio.Channel, method: MethodDescriptor, key: str | None) -> Outcome:
    """What becomes of a call with an empty request: refused at the door, or not."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    callable_ = getattr(channel, kind)(path_of(method))
    call = callable_(iter([b""]) if method.client_streaming else b"", metadata=bearing(key), timeout=60)
    try:
        await (call.read() if method.server_streaming else call)
        code = PASSED if method.server_streaming and not call.done() else await call.code()
    except grpc.aio.AioRpcError as error:
        code = error.code()
    finally:
        call.cancel()
    return code if code in (UNKNOWN, DENIED) else PASSED


@pytest.mark.parametrize("config", CONFIGS)
async def test_every_method_asks_who_calls(config: str) -> None:
    async with (
        serving(CONFIGS[config]) as port,
        make_channel(f"127.0.0.1:{port}", secret=SECRET) as member,
        make_channel(f"127.0.0.1:{port}") as stranger,
    ):
        known = [*methods(await services(stranger))]
        assert {path_of(method) for method in known} == METHODS.keys()
        for method, key, (is_member, channel) in itertools.product(known, KEYS, [(True, member), (False, stranger)]):
            seen = await outcome(channel, method, KEYS[key])
            what = f"{config}: {method.name} with {key}, {'and' if is_member else 'without'} the secret"
            assert (what, seen) == (what, expected(config, method, key, is_member))


def test_the_table_names_no_service_that_reflection_hides() -> None:
    assert f"/{reflection.SERVICE_NAME}/ServerReflectionInfo" in METHODS


def test_a_method_that_nobody_thought_of_is_for_operators() -> None:
    assert "/baton.v1.Admin/New" not in METHODS and METHODS["/baton.v1.Admin/Drain"] is AllowedCallers.OPERATORS
    check = partial(check_access, CONFIGS["keys required"], SECRET)
    with pytest.raises(PermissionDeniedError, match="the API key is tenant acme's: use an operator's key for this"):
        check("/baton.v1.Admin/New", (*bearing("acme-key"), *SECRET.metadata))
    with pytest.raises(UnauthenticatedError, match="New is for processes of this cluster"):
        check("/baton.v1.Admin/New", bearing("operator-key"))
    check("/baton.v1.Admin/New", (*bearing("operator-key"), *SECRET.metadata))

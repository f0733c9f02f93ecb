"""Who may call what: every method of every service on the clients' port, by every kind of caller."""

import itertools
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from baton.clock import SystemClock
from baton.errors import PermissionDeniedError, UnauthenticatedError
from baton.results import ModelInfo
from orchestrator.api.access import FORWARDED_KEYS, METHODS, Access, Doorkeeper, is_local
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.membership.members import Members
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.planners import linear_planner
from tests.support.models.tiny_tokenizer import letter_tokenizer
from transport.channel import make_channel

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
CHANGING = ("Drain", "Undrain", "StandIn", "UseCalibration", "UseStepTimes")

Outcome = str | grpc.StatusCode


def expected(config: str, method: str, key: str, is_here: bool) -> Outcome:
    """docs/tenants.md, "Who may call what", in other words."""
    if method in OPEN:
        return PASSED
    if method in CHANGING:
        return _expected_of_change(config, key, is_here)
    if config == "keys required":
        return UNKNOWN if key in ("no key", "a wrong key") else PASSED
    # Generate looks at keys by itself, where tenants have any; all else is for everybody.
    is_unknown = key == "a wrong key" or (key == "an operator's key" and config != "operators have keys")
    return UNKNOWN if method == "Generate" and config != "no keys" and is_unknown else PASSED


def _expected_of_change(config: str, key: str, is_here: bool) -> Outcome:
    if config == "no keys":
        return PASSED if is_here else UNKNOWN
    if key == "a tenant's key":
        return DENIED
    if key == "an operator's key" and config in ("keys required", "operators have keys"):
        return PASSED
    if key == "no key" and config == "tenants have keys" and is_here:
        return PASSED
    return UNKNOWN


def own_address() -> str:
    """Of an interface of this machine that is not the loopback one; no packet leaves for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no interface but the loopback one")
        return str(probe.getsockname()[0])


@asynccontextmanager
async def serving(tenants: Tenants) -> AsyncIterator[int]:
    """An orchestrator on all interfaces; its port."""
    model = ModelInfo("letters", 400, 64, "float32", False, "layout")
    config = OrchestratorConfig(tenants=tenants)
    server = await OrchestratorServer.start(
        *(Members(), letter_tokenizer(), model),
        clock=SystemClock(),
        host="0.0.0.0",
        config=config,
        planner=linear_planner(),
    )
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
    call = callable_(iter([b""]) if method.client_streaming else b"", metadata=bearing(key), timeout=10)
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
        make_channel(f"127.0.0.1:{port}") as here,
        make_channel(f"{own_address()}:{port}") as there,
    ):
        known = [*methods(await services(here))]
        assert {path_of(method) for method in known} == METHODS.keys()
        for method, key, (is_here, channel) in itertools.product(known, KEYS, [(True, here), (False, there)]):
            seen = await outcome(channel, method, KEYS[key])
            what = f"{config}: {method.name} with {key} from {'here' if is_here else 'elsewhere'}"
            assert (what, seen) == (what, expected(config, method.name, key, is_here))


def test_the_table_names_no_service_that_reflection_hides() -> None:
    assert f"/{reflection.SERVICE_NAME}/ServerReflectionInfo" in METHODS


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:127.0.0.1:50000",
        "ipv4:127.8.9.10:50000",
        "ipv6:[::1]:50000",
        "ipv6:%5B::1%5D:50000",
        "ipv6:[::ffff:127.0.0.1]:50000",
        "ipv6:%5B::ffff:127.0.0.1%5D:50000",
        "unix:",
        "unix:/run/baton.sock",
        "unix-abstract:baton",
    ],
)
def test_peers_of_this_machine(peer: str) -> None:
    assert is_local(peer)


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:10.0.0.1:50000",
        "ipv4:128.0.0.1:50000",
        "ipv6:[::ffff:10.0.0.1]:50000",
        "ipv6:[fd00::1]:50000",
        "ipv6:[fe80::1%25lo]:50000",
        "ipv6:%5Bfe80::1%25lo%5D:50000",
        "ipv4:localhost:50000",
        "vsock:2:50000",
        "127.0.0.1:50000",
        "",
    ],
)
def test_peers_that_may_be_elsewhere(peer: str) -> None:
    assert not is_local(peer)


@pytest.mark.parametrize("key", FORWARDED_KEYS)
def test_what_a_proxy_of_this_machine_passes_on_is_not_from_here(key: str) -> None:
    doorkeeper = Doorkeeper(Tenants())
    doorkeeper.check("/baton.v1.Admin/Drain", (), "ipv4:127.0.0.1:5")
    with pytest.raises(UnauthenticatedError, match="Drain is for operators: name a key in orchestrator.operator_keys"):
        doorkeeper.check("/baton.v1.Admin/Drain", ((key, "10.0.0.1"),), "ipv4:127.0.0.1:5")


def test_a_method_that_nobody_thought_of_is_for_operators() -> None:
    assert "/baton.v1.Admin/New" not in METHODS and METHODS["/baton.v1.Admin/Drain"] is Access.OPERATORS
    doorkeeper = Doorkeeper(CONFIGS["keys required"])
    with pytest.raises(PermissionDeniedError, match="the API key is tenant acme's: use an operator's key for this"):
        doorkeeper.check("/baton.v1.Admin/New", bearing("acme-key"), "ipv4:127.0.0.1:5")
    doorkeeper.check("/baton.v1.Admin/New", bearing("operator-key"), "ipv4:10.0.0.1:5")

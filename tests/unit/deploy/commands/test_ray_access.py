"""Whether a Ray asks for a token, asked of one that does and of what is no Ray; and which hosts are this machine's."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from baton.errors import ConfigError, UnavailableError
from deploy.commands.ray_access import asks_token, is_loopback, prepare_to_join, prepare_to_start, require_reachable
from tests.support.wire.rpc import Service, served
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

TOKEN = Path("/secrets/ray_token")
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As it was, afterwards; without any choice of an operator's."""
    with patch.dict(os.environ):
        for name in AUTH:
            os.environ.pop(name, None)
        yield


def chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in AUTH if name in os.environ}


@pytest.mark.parametrize(
    ("host", "bound"), [("127.0.0.1", {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}), ("192.0.2.1", {})]
)
def test_a_ray_of_our_own_has_a_token(host: str, bound: dict[str, str]) -> None:
    prepare_to_start(TOKEN, host)
    assert chosen() == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(TOKEN), **bound}


@pytest.mark.parametrize(
    "choice",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"},
        {"RAY_AUTH_TOKEN_PATH": "/theirs"},
    ],
)
def test_what_the_operator_chose_stays(choice: dict[str, str]) -> None:
    os.environ.update(choice)
    prepare_to_start(TOKEN, "127.0.0.1")
    assert chosen().items() >= choice.items()
    assert os.environ["RAY_AUTH_MODE"] == choice.get("RAY_AUTH_MODE", "token")


async def test_a_server_that_asks_for_no_token_is_joined_without_one() -> None:
    async with served(Service()) as port:
        assert not await asyncio.to_thread(asks_token, f"127.0.0.1:{port}")
        await asyncio.to_thread(prepare_to_join, f"127.0.0.1:{port}")
    assert "RAY_AUTH_MODE" not in chosen()


@pytest.mark.parametrize("mode", ["disabled", "token"])
async def test_a_choice_that_a_ray_refuses_is_named(mode: str) -> None:
    os.environ["RAY_AUTH_MODE"] = mode
    async with served(Service(), check=SECRET.check, name="ray.rpc.NodeInfoGcsService") as port:
        joining = asyncio.to_thread(prepare_to_join, f"127.0.0.1:{port}")
        if mode == "token":
            await joining
        else:
            with pytest.raises(ConfigError, match="asks for a token, and RAY_AUTH_MODE is disabled: unset it"):
                await joining


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no address"])
def test_a_ray_that_is_not_there_is_named_at_once(address: str) -> None:
    with pytest.raises(UnavailableError, match=f"Ray at {address} cannot be reached"):
        require_reachable(address)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_a_loopback_host_is_told_from_others(host: str, is_local: bool) -> None:
    assert is_loopback(host) == is_local
    assert not is_loopback("no such host")

"""Which requests the gateway refuses for the host or the web page that they come from."""

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from baton.errors import BatonError, ConfigError, UnauthenticatedError, UnavailableError
from baton.results.completion import ModelInfo
from gateway.door.access import Access
from gateway.door.hosts import CrossOrigin, HostCheck
from gateway.door.rules import HttpRules
from gateway.upstream import Upstream

NAMED = HttpRules(allowed_hosts=("llm.example.com",))
PAGES = HttpRules(allow_origins=("https://chat.example.com",))
EVIL = {"host": "attacker.example"}
REBOUND = {"host": "attacker.example:8000", "origin": "http://attacker.example:8000"}


class Server(Upstream):
    """Server that answers callers without a key, or refuses them."""

    def __init__(self, refuses: BatonError | None = None) -> None:
        self._refuses = refuses

    async def model(self, metadata: object) -> ModelInfo:
        """Refuse, or answer nothing that anybody reads."""
        if self._refuses is not None:
            raise self._refuses
        return None  # type: ignore[return-value]


KEYLESS, KEYED, AWAY = Server(), Server(UnauthenticatedError("a key")), Server(UnavailableError("away"))


async def status(
    headers: dict[str, str], server: Server, rules: HttpRules, *, is_loopback: bool, path: str = "/v1/models"
) -> int:
    app = HostCheck(PlainTextResponse("served"), rules, Access(server), is_loopback=is_loopback)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost:8000") as client:
        answer = await client.get(path, headers=headers)
    assert answer.is_success or answer.json()["error"]["message"].startswith(("host '", "origin '"))
    return answer.status_code


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "LOCALHOST"}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "127.9.9.9"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        (EVIL, 421),
        (REBOUND, 421),
        ({"host": "localhost.attacker.example"}, 421),
        ({"host": "10.0.0.1"}, 421),
        ({"host": "[::2]"}, 421),
        ({"host": ""}, 421),
        ({"host": "127.0.0.1", "origin": "http://evil.example"}, 403),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"}, 403),
        ({"host": "127.0.0.1", "origin": "null"}, 403),
    ],
)
async def test_on_loopback_without_keys_only_requests_to_loopback_names_are_answered(
    headers: dict[str, str], expected: int
) -> None:
    assert await status(headers, KEYLESS, HttpRules(), is_loopback=True) == expected
    assert await status(headers, AWAY, HttpRules(), is_loopback=True) == expected
    assert await status(headers, KEYED, HttpRules(), is_loopback=True) == 200
    assert await status(headers, KEYLESS, HttpRules(), is_loopback=False) == 200


@pytest.mark.parametrize("server", [KEYLESS, KEYED])
@pytest.mark.parametrize("is_loopback", [False, True])
async def test_configured_hosts_are_the_only_ones_besides_loopback_names(server: Server, is_loopback: bool) -> None:
    for host, expected in (("llm.example.com:443", 200), ("LLM.example.com", 200), ("localhost", 200), ("other", 421)):
        assert await status({"host": host}, server, NAMED, is_loopback=is_loopback) == expected
    own = {"host": "llm.example.com", "origin": "https://llm.example.com"}
    assert await status(own, server, NAMED, is_loopback=is_loopback) == 200
    foreign = {"host": "llm.example.com", "origin": "https://evil.example"}
    assert await status(foreign, server, NAMED, is_loopback=is_loopback) == 403


async def test_pages_of_configured_origins_are_answered() -> None:
    for rules, origin, expected in (
        (PAGES, "https://chat.example.com", 200),
        (PAGES, "https://other.example.com", 403),
        (HttpRules(allow_origins=("*",)), "https://other.example.com", 200),
    ):
        headers = {"host": "localhost", "origin": origin}
        assert await status(headers, KEYLESS, rules, is_loopback=True) == expected


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"origin": "https://other.example.com", "access-control-request-method": "POST"}, "origin"),
        ({"origin": "https://chat.example.com", "access-control-request-method": "PUT"}, "method"),
    ],
)
async def test_a_page_that_may_not_ask_is_refused_in_openais_shape(headers: dict[str, str], named: str) -> None:
    app = CrossOrigin(PlainTextResponse("served"), PAGES.allow_origins, ("GET", "POST"), ("*",))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost:8000") as client:
        answer = await client.options("/v1/models", headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(f"Disallowed CORS {named}") and "Origin" in answer.headers["vary"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_are_answered_for_any_host(path: str) -> None:
    assert await status(EVIL, KEYLESS, NAMED, is_loopback=True, path=path) == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_hosts", "https://a.example"),
        ("allowed_hosts", "a.example:8000"),
        ("allowed_hosts", ""),
        ("allow_origins", "a.example"),
        ("allow_origins", "https://a.example/"),
    ],
)
def test_what_names_no_host_or_origin_is_refused(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=field):
        HttpRules(**{field: (value,)})  # type: ignore[arg-type]

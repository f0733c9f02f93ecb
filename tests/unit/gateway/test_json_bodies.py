"""Bodies are bounded before anything is made of them, on every route and in every list or map that a route takes."""

import asyncio
import math
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.errors import UnauthenticatedError
from tests.support.kernels.os_memory import peak_bytes, reset_peak
from tests.support.models.tiny_tokenizer import chat_letters
from tests.support.wire.held_loop import watching_loop
from tests.support.wire.hostile.bodies import REFUSALS, Field, fields_of, first_of_each_route, status_of
from tests.support.wire.http_gateway import scripted_gateway

pytestmark = pytest.mark.integration

MOST_S = 0.5
MOST_CALLBACK_S = 0.05
MOST_LAG_S = 0.1
NUM_TRIES = 3
"""Number of tries for a body. A collection of all garbage of earlier tests, or another process, delays a single try. A
body that takes too long delays every try."""
MOST_BYTES = 200 * 2**20


async def check_fields(folder: Path, *, at_night: bool) -> None:
    """Fill one field of each route, or at night each field. Watch the loop; its delays count at night only."""
    most = Cost(MOST_S, MOST_CALLBACK_S, MOST_LAG_S if at_night else math.inf)
    async with scripted_gateway(tokenizer=chat_letters(folder)) as (_, http, client):
        fields = fields_of((await client.get("/openapi.json")).json())
        for field in fields if at_night else first_of_each_route(fields):
            for body in field.bodies():
                tries = [await cost_of(http.port, field, body)]
                while not tries[-1].within(most):
                    assert len(tries) < NUM_TRIES, f"{field.told(body)}: {tries}, at most {most}"
                    tries.append(await cost_of(http.port, field, body))


class Cost(NamedTuple):
    """Time that a request costs the process of its server."""

    took_s: float
    """Processor time in seconds, of all threads."""
    callback_s: float
    """Maximum processor time in seconds that the loop's thread used between two wake-ups."""
    lag_s: float
    """Maximum delay of the loop in seconds."""

    def within(self, most: "Cost") -> bool:
        return all(value < limit for value, limit in zip(self, most, strict=True))


async def cost_of(port: int, field: Field, body: bytes) -> Cost:
    """Send a body. Check the answer's status and the peak of this process's memory; return the request's cost."""
    reset_peak()
    before_s, before = time.process_time(), peak_bytes()
    async with watching_loop() as held:
        status = await asyncio.to_thread(status_of, port, field.path, body)
    took_s = time.process_time() - before_s
    assert status in {200, *REFUSALS}, field.told(body)
    assert peak_bytes() - before < MOST_BYTES, field.told(body)
    return Cost(took_s, held.most_s, held.most_lag_s)


async def test_a_field_of_each_route_may_be_full_of_anything(tmp_path: Path) -> None:
    await check_fields(tmp_path, at_night=False)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_every_list_and_map_may_be_full_of_anything(tmp_path: Path) -> None:
    await check_fields(tmp_path, at_night=True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/console/api/chat"])
async def test_a_caller_who_is_not_known_has_nothing_read(path: str) -> None:
    async with scripted_gateway() as (service, _http, client):
        service.refuses_callers = UnauthenticatedError("send a key")
        answer = await client.post(path, content=b"no JSON", headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")

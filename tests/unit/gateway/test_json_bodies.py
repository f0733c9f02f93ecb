"""Bodies are bounded before anything is made of them, on every route and in every list or map that a route takes."""

import asyncio
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.errors import InvalidArgumentError, UnauthenticatedError
from baton.limits import MAX_OBJECTS, MAX_TEXTS, MAX_VALUES
from gateway.door.json_bodies import parse
from gateway.errors import BodyTooLargeError
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


@pytest.mark.parametrize(
    ("element", "most"),
    [(b"0", MAX_VALUES + 1), (b'""', MAX_TEXTS), (b'","', MAX_TEXTS), (b'"\\""', MAX_TEXTS)],
    ids=["numbers", "texts", "texts of commas", "texts of quotes"],
)
def test_as_many_values_as_the_limit_are_read_and_one_more_is_refused(element: bytes, most: int) -> None:
    elements = [element] * most
    value = parse(b"[" + b",".join(elements) + b"]")
    assert isinstance(value, list) and len(value) == most
    with pytest.raises(BodyTooLargeError, match="the limit is"):
        parse(b"[" + b",".join([*elements, element]) + b"]")


@pytest.mark.parametrize("element", [b"[]", b"{}"])
def test_as_many_objects_as_the_limit_are_read_and_one_more_is_refused(element: bytes) -> None:
    elements = [element] * (MAX_OBJECTS - 1)
    assert isinstance(parse(b"[" + b",".join(elements) + b"]"), list)
    with pytest.raises(BodyTooLargeError, match=f"has {MAX_OBJECTS + 1} lists and objects"):
        parse(b"[" + b",".join([*elements, element]) + b"]")


@pytest.mark.parametrize("text", [",[{" * 10**6, '\\",\\\\' * 10**6, '\\"[' * 10**6, "\\n,[" * 10**6])
def test_marks_in_a_text_do_not_count(text: str) -> None:
    assert parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"\\uDE00": 1}', "half of a surrogate pair"),
        (b'{"a": [NaN]}', "body holds NaN"),
        (b'{"a": -Infinity}', "body holds -Infinity"),
        (b'{"a": 1e999}', "body holds 1e999, which is too large"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\xed\xa0\xbd"}', "not UTF-8 at byte 7"),
        (b'{"a": }', "not valid JSON: Expecting value at character 6"),
        (b"[" * 15_000, "nested too deeply"),
        (b"1" * 5000, "not valid JSON: Exceeds the limit"),
    ],
)
def test_what_could_not_be_sent_on_is_refused_as_it_is_read(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        parse(body)


@pytest.mark.parametrize("body", [b'{"a": "\\ud83d\\ude00"}', b'\xef\xbb\xbf{"a": "\xf0\x9f\x98\x80"}'])
def test_whole_characters_are_read(body: bytes) -> None:
    assert parse(body) == {"a": "\U0001f600"}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


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
    """Send a body. Check the answer's status and the growth of this process; return the request's cost."""
    before_s, before = time.process_time(), resident_bytes()
    async with watching_loop() as held:
        status = await asyncio.to_thread(status_of, port, field.path, body)
    took_s = time.process_time() - before_s
    assert status in {200, *REFUSALS}, field.told(body)
    assert resident_bytes() - before < MOST_BYTES, field.told(body)
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

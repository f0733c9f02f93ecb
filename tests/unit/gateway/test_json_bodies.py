"""Bodies are bounded before anything is made of them, on every route and in every list or map that a route takes."""

import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidArgumentError, UnauthenticatedError
from baton.limits import MAX_BODY_BYTES, MAX_OBJECTS, MAX_TEXTS, MAX_VALUES
from gateway.door.json_bodies import parse
from gateway.errors import BodyTooLargeError
from tests.support.wire.held_loop import watching_loop
from tests.support.wire.http_gateway import scripted_gateway

pytestmark = pytest.mark.integration

MOST_S = 0.5
MOST_CALLBACK_S = 0.05
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


def cheapest(schema: dict[str, Any], names: dict[str, Any]) -> str:
    """A short value that the schema allows, as JSON."""
    if "$ref" in schema:
        return cheapest(names[schema["$ref"].rpartition("/")[2]], names)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return min((cheapest(each, names) for each in schema[key]), key=len)
    if "const" in schema or "enum" in schema:
        return json.dumps(schema.get("const", (schema.get("enum") or [None])[0]))
    kind = schema.get("type")
    if kind == "object":
        needed = [f'"{name}":{cheapest(schema["properties"][name], names)}' for name in schema.get("required", ())]
        return "{" + ",".join(needed) + "}"
    return {"string": '"a"' if schema.get("minLength") else '""', "array": "[]", "boolean": "true", "null": "null"}.get(
        str(kind), "0"
    )


def fields_of(document: dict[str, Any]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Route, list or map field, what the body needs besides it, and elements of which a body may be full: right ones
    and wrong ones."""
    names = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            continue
        body = names[content["schema"]["$ref"].rpartition("/")[2]]
        for field, schema in body["properties"].items():
            others = "".join(
                f'"{name}":{cheapest(body["properties"][name], names)},'
                for name in body.get("required", ())
                if name != field
            )
            kinds = [schema, *schema.get("anyOf", ())]
            for kind in [names[each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in kinds]:
                if kind.get("type") == "array":
                    right = cheapest(kind.get("items", {}), names)
                    yield path, field, others, sorted({right, "0", '""', "{}", "[]"})
                elif kind.get("type") == "object" and "properties" not in kind:
                    yield path, field, others, ['"{}":0', '"{}":""', '"{}":[]']


def full(field: str, others: str, element: str, num_bytes: int) -> bytes:
    """A body of about so many bytes whose field has nothing but that element."""
    number = num_bytes // (len(element) + 1)
    if element.startswith('"{}":'):  # keys differ
        number = num_bytes // (len(element) + 6)
        inside = "{" + ",".join(element.format(key) for key in range(number)) + "}"
    else:
        inside = "[" + ",".join([element] * number) + "]"
    return f'{{{others}"{field}":{inside}}}'.encode()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def check_fields(one_of_each_route: bool) -> None:
    """Fill fields, at the limit of bytes and below those of values and objects, while the loop is watched."""
    async with scripted_gateway() as (_, http, client):
        document = (await client.get("/openapi.json")).json()
        seen = set[str]()
        for path, field, others, elements in fields_of(document):
            if one_of_each_route and path in seen:
                continue
            seen.add(path)
            for element in elements:
                for most in (MAX_OBJECTS, MAX_TEXTS, MAX_VALUES, MAX_BODY_BYTES):
                    num_bytes = min(most * (len(element) + 1), MAX_BODY_BYTES) - 4096
                    body = full(field, others, element, num_bytes)
                    await check_body(http.port, path, body, f"{path} {field} full of {element}, {len(body)} bytes")
        assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"} <= seen


async def check_body(port: int, path: str, body: bytes, what: str) -> None:
    before_s, before = time.process_time(), resident_bytes()
    async with watching_loop() as held:
        status = await asyncio.to_thread(_status, port, path, body)
    took_s = time.process_time() - before_s
    assert status in (200, 400, 413, 422), what
    assert took_s < MOST_S, f"{what}: {took_s:.2f} s"
    assert held.most_s < MOST_CALLBACK_S, f"{what}: {held.most_s:.3f} s of the loop"
    assert resident_bytes() - before < MOST_BYTES, what


def _status(port: int, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


async def test_a_field_of_each_route_may_be_full_of_anything() -> None:
    await check_fields(one_of_each_route=True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_every_list_and_map_may_be_full_of_anything() -> None:
    await check_fields(one_of_each_route=False)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/console/api/chat"])
async def test_a_caller_who_is_not_known_has_nothing_read(path: str) -> None:
    async with scripted_gateway() as (service, _http, client):
        service.refuses_callers = UnauthenticatedError("send a key")
        answer = await client.post(path, content=b"no JSON", headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")

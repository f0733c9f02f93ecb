"""Bodies of HTTP requests whose lists and maps are filled with copies of one element. They are derived from the API's
OpenAPI document."""

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from baton.limits import MAX_BODY_BYTES, MAX_OBJECTS, MAX_TEXTS, MAX_VALUES

ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"})
"""Routes that accept a body."""
REFUSALS = frozenset({400, 413, 422})
TIMEOUT_S = 120
_USABLE = {
    "messages": '[{"role":"user","content":"a"}]', "role": '"user"', "prompt": '"a"', "input": '"a"',
    "max_tokens": "1", "max_output_tokens": "1",
}  # fmt: skip
"""Values of properties for which a body is accepted and cheap to process. The properties' schemas permit other values,
too."""
_NEEDED = ("messages", "role", "max_tokens", "max_output_tokens")
"""Properties that receive a value of _USABLE even if their schema does not require them."""
_MARGIN_BYTES = 4096

Json = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A list or map in a route's body, at any depth."""

    path: str
    name: str = ""
    """Path of the field in the body, such as `messages[].content`."""
    before: str = ""
    """JSON text of the body in front of the field's value."""
    after: str = ""
    elements: tuple[str, ...] = ()
    """Valid and invalid elements, as JSON. Elements of a map have the key `{}`, which is replaced by a number."""

    def bodies(self) -> Iterator[bytes]:
        """Yield bodies filled with each element: one just below each limit on the number of values, and one at the
        limit on bytes."""
        for element in self.elements:
            for most in (MAX_OBJECTS, MAX_TEXTS, MAX_VALUES, MAX_BODY_BYTES):
                yield self._full(element, min(most * (len(element) + 1), MAX_BODY_BYTES) - _MARGIN_BYTES)

    def told(self, body: bytes) -> str:
        """Return a description of a body for messages."""
        return f"{self.path}, {self.name}: {len(body)} bytes, {body[:90]!r}"

    def within(self, name: str, before: str, after: str) -> "Field":
        """Return the field of a nested value. `before` and `after` are the texts around the nested value in this
        field's value."""
        return replace(self, name=(self.name + name).lstrip("."), before=self.before + before, after=after + self.after)

    def _full(self, element: str, num_bytes: int) -> bytes:
        if element.startswith('"{}":'):  # the keys of a map must differ
            number = num_bytes // (len(element) + 6)
            inside = "{" + ",".join(element.format(key) for key in range(number)) + "}"
        else:
            inside = "[" + ",".join([element] * (num_bytes // (len(element) + 1))) + "]"
        return f"{self.before}{inside}{self.after}".encode()


def fields_of(document: Json) -> list[Field]:
    """Return all lists and maps that routes of the OpenAPI document accept."""
    names, found = document["components"]["schemas"], dict[Field, None]()
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is not None:
            found |= dict.fromkeys(_fields(content["schema"], names, Field(path)))
    assert {field.path for field in found} == ROUTES
    return [*found]


def first_of_each_route(fields: list[Field]) -> list[Field]:
    """Return one field of each route."""
    return [*{field.path: field for field in reversed(fields)}.values()]


def status_of(port: int, path: str, body: bytes) -> int:
    """Send a body to a route on 127.0.0.1, and return the answer's HTTP status. Blocks."""
    return answer_of(port, path, body)[0]


def answer_of(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a body to a route on 127.0.0.1, and return the answer's HTTP status and body. Blocks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _fields(schema: Json, names: Json, place: Field) -> Iterator[Field]:
    for kind in _kinds(schema, names):
        if kind.get("type") == "array":
            yield replace(place, elements=tuple(sorted({_cheapest(kind["items"], names), "0", '""', "{}", "[]"})))
            yield from _fields(kind["items"], names, place.within("[]", "[", "]"))
        elif "properties" in kind:
            for name, inner in kind["properties"].items():
                others = "".join(f"{each}," for each in _required(kind, names, name))
                yield from _fields(inner, names, place.within(f".{name}", f'{{{others}"{name}":', "}"))
        elif kind.get("type") == "object":
            yield replace(place, elements=('"{}":0', '"{}":""', '"{}":[]'))


def _kinds(schema: Json, names: Json) -> Iterator[Json]:
    """Yield the alternatives of a schema. References at the top of an alternative are resolved."""
    if "$ref" in schema:
        yield from _kinds(names[schema["$ref"].rpartition("/")[2]], names)
    elif "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _kinds(each, names)
    else:
        yield schema


def _required(kind: Json, names: Json, but: str = "") -> Iterator[str]:
    """Yield the required properties of an object as JSON, except `but`."""
    needed = (*kind.get("required", ()), *(name for name in _NEEDED if name in kind["properties"]))
    for name in dict.fromkeys(needed):
        if name != but:
            yield f'"{name}":{_USABLE.get(name) or _cheapest(kind["properties"][name], names)}'


def _cheapest(schema: Json, names: Json) -> str:
    """Return a short value that is valid for the schema, as JSON."""
    return min((_cheapest_of(kind, names) for kind in _kinds(schema, names)), key=len)


def _cheapest_of(kind: Json, names: Json) -> str:
    if "const" in kind or "enum" in kind:
        return json.dumps(kind.get("const", (kind.get("enum") or [None])[0]))
    if kind.get("type") == "object":
        return "{" + ",".join(_required(kind, names)) + "}"
    return {"string": '"a"', "array": "[]", "boolean": "true", "null": "null"}.get(str(kind.get("type")), "0")

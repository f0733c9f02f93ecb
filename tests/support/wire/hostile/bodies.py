"""Bodies of HTTP requests whose lists and maps are full of one element, as the document of the API describes them."""

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from baton.limits import MAX_BODY_BYTES, MAX_OBJECTS, MAX_TEXTS, MAX_VALUES

ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"})
"""Routes that take a body."""
REFUSALS = frozenset({400, 413, 422})
TIMEOUT_S = 120
_USABLE = {
    "messages": '[{"role":"user","content":"a"}]', "role": '"user"', "prompt": '"a"', "input": '"a"',
    "max_tokens": "1", "max_output_tokens": "1",
}  # fmt: skip
"""Values of properties with which a body is admitted, and costs little: their schemas allow others, too."""
_NEEDED = ("messages", "role", "max_tokens", "max_output_tokens")
"""Properties that get such a value also where their schema does not require them."""
_MARGIN_BYTES = 4096

Json = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """List or map of a route's body, or of a value within it."""

    path: str
    name: str = ""
    """Its place in the body, such as `messages[].content`."""
    before: str = ""
    """JSON text of the body up to the value of the field."""
    after: str = ""
    elements: tuple[str, ...] = ()
    """Right and wrong elements, as JSON. Those of a map have the key `{}`, which is replaced by a number."""

    def bodies(self) -> Iterator[bytes]:
        """Yield bodies for each element: just below each limit on the values of a body, and at the limit of bytes."""
        for element in self.elements:
            for most in (MAX_OBJECTS, MAX_TEXTS, MAX_VALUES, MAX_BODY_BYTES):
                yield self._full(element, min(most * (len(element) + 1), MAX_BODY_BYTES) - _MARGIN_BYTES)

    def told(self, body: bytes) -> str:
        """Return a body of the field in words, for messages."""
        return f"{self.path}, {self.name}: {len(body)} bytes, {body[:90]!r}"

    def within(self, name: str, before: str, after: str) -> "Field":
        """Return the place of a value between these texts of this value."""
        return replace(self, name=(self.name + name).lstrip("."), before=self.before + before, after=after + self.after)

    def _full(self, element: str, num_bytes: int) -> bytes:
        if element.startswith('"{}":'):  # keys differ
            number = num_bytes // (len(element) + 6)
            inside = "{" + ",".join(element.format(key) for key in range(number)) + "}"
        else:
            inside = "[" + ",".join([element] * (num_bytes // (len(element) + 1))) + "]"
        return f"{self.before}{inside}{self.after}".encode()


def fields_of(document: Json) -> list[Field]:
    """Return each list and map that a route of the OpenAPI document takes."""
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
    """Return the status of the answer to a body that is sent to 127.0.0.1. Blocks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
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
    """Yield the alternatives of a schema, each without a reference at its top."""
    if "$ref" in schema:
        yield from _kinds(names[schema["$ref"].rpartition("/")[2]], names)
    elif "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _kinds(each, names)
    else:
        yield schema


def _required(kind: Json, names: Json, but: str = "") -> Iterator[str]:
    """Yield the properties that an object needs, except `but`, as JSON."""
    needed = (*kind.get("required", ()), *(name for name in _NEEDED if name in kind["properties"]))
    for name in dict.fromkeys(needed):
        if name != but:
            yield f'"{name}":{_USABLE.get(name) or _cheapest(kind["properties"][name], names)}'


def _cheapest(schema: Json, names: Json) -> str:
    """Return a short value that the schema allows, as JSON."""
    return min((_cheapest_of(kind, names) for kind in _kinds(schema, names)), key=len)


def _cheapest_of(kind: Json, names: Json) -> str:
    if "const" in kind or "enum" in kind:
        return json.dumps(kind.get("const", (kind.get("enum") or [None])[0]))
    if kind.get("type") == "object":
        return "{" + ",".join(_required(kind, names)) + "}"
    return {"string": '"a"', "array": "[]", "boolean": "true", "null": "null"}.get(str(kind.get("type")), "0")

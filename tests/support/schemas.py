"""JSON schemas for tests: random schemas, and those of the public test suite."""

import json
import random
from pathlib import Path
from typing import Any

SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite"

Schema = dict[str, Any]


def random_schema(seed: int) -> Schema:
    """Return a random schema of nested objects, arrays and bounded values. Short answers always exist."""
    return _value(random.Random(seed), depth=0)


def suite_schemas() -> list[tuple[str, Schema]]:
    """Return `(name, schema)` of each case of the suite whose schema is an object. Schemas with \\p in a pattern are
    left out, because the jsonschema package, which validates answers, uses Python's regular expressions, which do not
    support it."""
    return [
        (f"{path.stem}: {case['description']}", case["schema"])
        for path in sorted(SUITE.glob("*.json"))
        for case in json.loads(path.read_text())
        if isinstance(case["schema"], dict) and "\\p" not in json.dumps(case["schema"])
    ]


def _value(rng: random.Random, depth: int) -> Schema:
    makers = [_text, _integer, _number, _choice, _plain, _either]
    if depth < 3:
        makers += [_object, _array, _object]
    if depth == 0:
        return _object(rng, depth)
    return rng.choice(makers)(rng, depth)


def _text(rng: random.Random, depth: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(["^[a-z]{1,5}$", "^[0-9]{3}-[0-9]{2}$", "^x+y$", "ab"])}
    if kind == 1:
        return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(8)}


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(-50, 50)
    schema: Schema = {"type": "integer", "minimum": least, "maximum": least + rng.randrange(1, 2000)}
    return schema | ({"multipleOf": rng.choice([1, 2, 5])} if rng.random() < 0.3 else {})


def _number(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(-5, 5)
    return {"type": "number", "exclusiveMinimum": least, "maximum": least + 1 + rng.random()}


def _choice(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = ["red", 'a "quoted" word', 7, -1.5, True, None, {"k": [1, "two"]}, []]
    return {"enum": rng.sample(values, rng.randrange(1, 4))} if rng.random() < 0.8 else {"const": rng.choice(values)}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_integer(rng, depth), _text(rng, depth), _plain(rng, depth)]}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "two words", "a/b", "x", "tags", "0"], rng.randrange(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    schema: Schema = {
        "type": "object",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "additionalProperties": False,
    }
    return schema | ({"required": required} if required else {})


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    bounds = {"minItems": least, "maxItems": least + rng.randrange(1, 3)}
    if rng.random() < 0.3:
        items = [_value(rng, depth + 1), _value(rng, depth + 1)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    return {"type": "array", "items": _value(rng, depth + 1), **bounds}

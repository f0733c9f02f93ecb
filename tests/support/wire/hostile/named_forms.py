"""Structured-output constraints that ended processes, or took minutes or gigabytes, before constraints were compiled in
child processes. Each is within the limit on the size of a constraint."""

import json
from typing import Any

from baton.sampling_params import StructuredOutput

CHAIN_OF_RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2750)) + 'r2750: "a"'
"""Grammar that ended the process that compiled it in a thread with a stack of 8 MiB."""


def named_forms() -> dict[str, StructuredOutput]:
    """Return the constraints by name: deep ones, chains, and those whose cost is not seen from their size."""
    found: dict[str, dict[str, Any]] = {**_deep(), **_chains(), **_costly()}
    return {name: StructuredOutput(**fields) for name, fields in found.items()}


def large_multiples() -> list[StructuredOutput]:
    """Return eight constraints that are compiled to as many bytes as `multipleOf` permits, then eight beyond."""
    within = (9973, 9967, 9949, 9941, 9931, 9929, 9923, 9907)
    beyond = (100_003, 100_019, 100_043, 100_049, 100_057, 100_069, 100_103, 100_109)
    return [StructuredOutput(json=json.dumps({"type": "integer", "multipleOf": of})) for of in within + beyond]


def _deep() -> dict[str, dict[str, Any]]:
    def nested(before: str, inner: str, after: str, depth: int) -> str:
        return before * depth + inner + after * depth

    many, few = 100_000, 900
    return {
        "parentheses in Lark": {"grammar": "start: " + nested("(", '"a"', ")", many)},
        "options in Lark": {"grammar": "start: " + nested("[", '"a"', "]", many)},
        "parentheses in a terminal": {"grammar": f"start: /{nested('(', 'a', ')', many)}/"},
        "complements": {"grammar": "start: TOK\nTOK: " + "~" * 200_000 + ' "a"'},
        "parentheses in GBNF": {"grammar": "root ::= " + nested("(", '"a"', ")", many)},
        "parentheses in a regex": {"regex": nested("(", "a", ")", many)},
        "items": {"json": nested('{"items":', "{}", "}", few)},
        "many items": {"json": nested('{"items":', "{}", "}", 20_000)},
        "properties": {"json": nested('{"properties":{"a":', "{}", "}}", few)},
        "anyOf": {"json": nested('{"anyOf":[', "{}", "]}", few)},
        "not": {"json": nested('{"not":', "{}", "}", few)},
        "a constant": {"json": f'{{"const":{nested("[", "", "]", few)}}}'},
        "a deep constant": {"json": f'{{"const":{nested("[", "", "]", many)}}}'},
        "allOf": {"json": nested('{"allOf":[', '{"type":"object"}', "]}", few)},
        "parentheses in a pattern": {"json": f'{{"type":"string","pattern":"{nested("(", "a", ")", many)}"}}'},
    }


def _chains() -> dict[str, dict[str, Any]]:
    def lines(start: str, name: str, assigns: str, number: int) -> str:
        rules = "".join(f"{name}{i}{assigns}{name}{i + 1}\n" for i in range(number))
        return f'{start}{assigns}{name}0\n{rules}{name}{number}{assigns}"a"\n'

    def references(number: int) -> str:
        chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(number)} | {f"a{number}": {"type": "boolean"}}
        return json.dumps({"$ref": "#/$defs/a0", "$defs": chain}, separators=(",", ":"))

    return {
        "a chain that ended processes": {"grammar": CHAIN_OF_RULES},
        "rules in Lark": {"grammar": lines("start", "r", ": ", 15_000)},
        "rules in Lark within the bound": {"grammar": lines("start", "r", ": ", 990)},
        "terminals": {"grammar": lines("start", "T", ": ", 15_000)},
        "terminals within the bound": {"grammar": lines("start", "T", ": ", 990)},
        "rules in GBNF": {"grammar": lines("root", "r", " ::= ", 9000)},
        "rules in GBNF within the bound": {"grammar": lines("root", "r", " ::= ", 990)},
        "references": {"json": references(7000)},
        "references within the bound": {"json": references(490)},
    }


def _costly() -> dict[str, dict[str, Any]]:
    words, wide = [f'"w{i}"' for i in range(20_000)], range(4000)
    pattern = {"type": "string", "pattern": "^(a|b){1,50}$"}
    integer = {"type": "integer", "minimum": 1, "maximum": 10**15}
    faulty = {"type": "string", "format": "nonsense"}
    schemas: dict[str, dict[str, Any]] = {
        "an enumeration": {"enum": [f"w{i}" for i in range(20_000)]},
        "patterns of properties": {
            "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,9}$"} for i in wide},
            "additionalProperties": False,
        },
        "a fault behind 4,000 definitions": {
            "$defs": {f"d{i}": {"type": "string", "maxLength": 9} for i in wide},
            "properties": {f"p{i}": {"type": "string"} for i in range(999)} | {"z": faulty},
        },
        "a fault behind alternatives": {
            "anyOf": [{"properties": {f"p{j}": pattern for j in range(8)}} for _ in range(300)] + [faulty]
        },
        "integers of an array": {"type": "array", "items": integer, "minItems": 10_000, "maxItems": 10_000},
        "a long text": {"type": "string", "maxLength": 10**7},
        "a multiple": {"type": "integer", "multipleOf": 999_983},
        "all alternatives of properties": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}": {"const": j}}, "required": [f"a{i}"]} for j in range(2)]}
                for i in range(16)
            ]
        },
    }
    return {
        **{name: {"json": json.dumps(schema)} for name, schema in schemas.items()},
        "words in GBNF": {"grammar": f"root ::= {' | '.join(words)}\n"},
        "words in Lark": {"grammar": f"start: {' | '.join(words)}\n"},
        "alternatives": {"regex": "|".join("ab"[i % 2] * (i % 50 + 1) for i in range(8000))},
        "a repetition": {"regex": "(a|b){100000}"},
        "repetitions": {"regex": "((a|b|cd){0,1000}x){0,1000}"},
        "a letter 1,000 letters ago": {"regex": ".*a.{1000}"},
        "classes of Unicode": {"regex": r"(\p{L}|\p{N}|\w)*" * 2000},
    }

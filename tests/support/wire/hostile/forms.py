"""Random and mutated structured-output constraints that are expensive to compile: chains, repetitions, products.

`python -m tests.support.wire.hostile.forms` prepares constraints as an engine does.
"""

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from baton.errors import InvalidArgumentError
from baton.limits import MAX_COMPILED_BYTES
from baton.modeling.checkpoints.weights import load_config
from baton.sampling_params import StructuredOutput
from baton.text.grammars import Grammars
from baton.text.tokenizer import Tokenizer
from tests.support.models.tiny_tokenizer import EOS_ID, letter_tokenizer

NUM_FIRST = 100
"""Constraints after which a process has loaded all that it uses."""
_CACHE_BYTES = 4 * 2**20
"""Size of the cache of an engine's grammars, small enough that constraints leave it."""

_NUMBERS = (0, 1, 2, 3, 7, 16, 50, 300, 999, 4096, 65_537, 10**6, 10**9, 2**63, 10**30)
_PIECES = (*'()[]{}|*+?\\"/~\n%\0', "::=", ": ", "$ref", "\u00fc", "\U0001f600")
_CLASSES: tuple[str, ...] = (*"ab.^$", *r"\w \d \s \p{L} [a-z] [^x] \x41 \. (?i) \b".split(), "ab", "\u00e9")
_FORMATS = ("date-time", "email", "ipv4", "ipv6", "uuid", "uri", "duration", "hostname", "nonsense")


def random_form(rng: Random) -> StructuredOutput:
    """Return a random constraint. Generators in equal states give equal constraints."""
    while True:
        field, text = rng.choice(_KINDS)(rng)
        if rng.random() < 0.3:
            text = _mutated(rng, text)
        given: dict[str, Any] = {field: text}
        try:
            return StructuredOutput(**given)
        except InvalidArgumentError:
            continue  # the constraint is empty or too long


def _regex(rng: Random) -> tuple[str, str]:
    return "regex", _expression(rng, rng.randrange(5))


def _expression(rng: Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(_CLASSES)
    parts = [_expression(rng, rng.randrange(depth)) for _ in range(rng.randint(1, 4))]
    match rng.randrange(4):
        case 0:
            return f"({'|'.join(parts)})"
        case 1:
            return "".join(parts)
        case 2:
            return f"({''.join(parts)}){rng.choice(['*', '+', '?'])}"
    least = _number(rng)
    return f"({''.join(parts)}){{{least},{rng.choice(['', str(least + _number(rng))])}}}"


def _lark(rng: Random) -> tuple[str, str]:
    return "grammar", _rules(rng, "start", ": ", lambda low, high: f"~{low}..{high}", f"/{_expression(rng, 2)}/")


def _gbnf(rng: Random) -> tuple[str, str]:
    return "grammar", _rules(rng, "root", " ::= ", lambda low, high: f"{{{low},{high}}}", "[a-z]")


def _rules(rng: Random, start: str, assigns: str, repeated: Callable[[int, int], str], leaf: str) -> str:
    """Return a chain of rules or terminals, or rules that refer to arbitrary other rules."""
    number = rng.choice((1, 3, 10, 10, 100, 900, 3000))
    is_chain, prefix = rng.random() < 0.5, rng.choice("rT") if assigns == ": " else "r"
    lines = [f"{start}{assigns}{prefix}0"]
    for index in range(number):
        names = [f"{prefix}{index + 1 if is_chain else rng.randint(0, number)}" for _ in range(rng.randint(1, 3))]
        if not is_chain or rng.random() < 0.1:
            names.append(rng.choice((leaf, '"a"', '"b"?', "(" + names[0] + ")*")))
        low = rng.choice(_NUMBERS[:8])
        if rng.random() < (0.02 if number > 10 else 0.3):
            names[-1] += repeated(low, low + _number(rng))
        lines.append(f"{prefix}{index}{assigns}{rng.choice((' ', ' | ')).join(names)}")
    return "\n".join([*lines, f'{prefix}{number}{assigns}"a"', ""])


def _schema(rng: Random) -> tuple[str, str]:
    names = [f"d{index}" for index in range(rng.choice((0, 0, 1, 5, 60, 600)))]
    made = _value(rng, rng.randrange(1, 5), names)
    if names:
        is_chain = rng.random() < 0.5
        made["$defs"] = {
            name: {"items": {"$ref": f"#/$defs/d{index + 1}"}}
            if is_chain and index + 1 < len(names)
            else _value(rng, 1, names)
            for index, name in enumerate(names)
        }
    return "json", json.dumps(made)


def _value(rng: Random, depth: int, names: list[str]) -> dict[str, Any]:
    def inner() -> dict[str, Any]:
        return _value(rng, depth - 1, names)

    if names and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    number, several = _number(rng), rng.choice((1, 2, 3, 3, 8, 40) if depth > 1 else (1, 2, 200))
    match rng.randrange(8 if depth else 5):
        case 0:
            return {"type": "string", "minLength": rng.choice(_NUMBERS[:6]), "maxLength": number}
        case 1:
            return {"type": "string", "pattern": _expression(rng, rng.randrange(4))}
        case 2:
            return {"type": rng.choice(["integer", "number"]), rng.choice(["multipleOf", "minimum", "maximum"]): number}
        case 3:
            return {"enum": [rng.choice(["a", 1, None, "b" * 9]) for _ in range(several)] + [number]}
        case 4:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        case 5:
            return {"type": "array", "items": inner(), "minItems": rng.choice(_NUMBERS[:8]), "maxItems": number}
        case 6:
            properties = {f"p{index}": inner() for index in range(several)}
            required = rng.sample(sorted(properties), rng.randint(0, several))
            more = rng.choice([False, True, {"type": "string"}])
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}
    return {rng.choice(["allOf", "anyOf", "oneOf", "prefixItems"]): [inner() for _ in range(several)]}


def _choice(rng: Random) -> tuple[str, Any]:
    return "choice", tuple(
        "".join(rng.choices('ab"\\\n\U0001f600', k=rng.randint(1, 30))) for _ in range(rng.choice((1, 5, 1000)))
    )


def _number(rng: Random) -> int:
    return rng.choice(_NUMBERS[: rng.choice((6, 9, len(_NUMBERS)))])


def _mutated(rng: Random, text: Any) -> Any:
    """Return a text in which some spans are removed, repeated or replaced."""
    if not isinstance(text, str):
        return text
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice((1, 1, 5, 40)))
        span = rng.choice(
            ("", text[start:end] * rng.choice((2, 3, 500)), rng.choice(_PIECES) * rng.choice((1, 1, 2, 2000)))
        )
        text = text[:start] + span + text[end:]
    return text


_KINDS = (_regex, _regex, _lark, _lark, _gbnf, _schema, _schema, _schema, _choice)


def main() -> None:
    """Prepare accepted constraints as an engine does, and advance each by some tokens.

    Standard input holds JSON: the seed of the constraints, the model's folder (empty: letters), and pairs of the number
    of a constraint and its compiled bytes. Print the processor time in seconds of the most expensive constraint, and
    the growth of the resident memory in bytes since the constraints with numbers below NUM_FIRST."""
    seed, folder, accepted = json.load(sys.stdin)
    num_bytes, rng, drawing, most_s = dict(accepted), Random(0), Random(seed), 0.0
    grammars = grammars_of(folder, max_bytes=_CACHE_BYTES)
    grammars.prepare(StructuredOutput(regex="a"), ()).result()
    first_bytes = resident_bytes([os.getpid()])
    for index in range(max(num_bytes) + 1):
        drawn = random_form(drawing)
        if index == NUM_FIRST:
            first_bytes = resident_bytes([os.getpid()])
        if index not in num_bytes:
            continue
        form, begun_s = replace(drawn, compiled_bytes=num_bytes[index]), time.process_time()
        grammars.prepare(form, ()).result()
        matcher = grammars.compile(form).matcher()
        with contextlib.suppress(InvalidArgumentError):  # an engine ends the choice if a mask is too expensive
            for _ in range(16):
                allowed = [token_id for token_id, most in enumerate(matcher.mask()) if most > 0]
                matcher.consume([rng.choice(allowed)])
        del matcher
        most_s = max(most_s, time.process_time() - begun_s)
    grammars.close()
    print(json.dumps([most_s, resident_bytes([os.getpid()]) - first_bytes]))


def grammars_of(folder: str, max_bytes: int = MAX_COMPILED_BYTES) -> Grammars:
    """Return the grammars of the model in `folder`; empty: of the tokenizer of letters. The caller must close them."""
    if not folder:
        return Grammars(letter_tokenizer().to_json, (EOS_ID,), max_bytes=max_bytes)
    eos_token_ids = load_config(Path(folder)).eos_token_ids
    return Grammars(Tokenizer.load(Path(folder)).to_json, eos_token_ids, max_bytes=max_bytes)


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes, in bytes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()

"""Gives ids to the input items of a response, and divides the list of items into pages."""

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.errors import InvalidArgumentError
from gateway.answers import Object
from gateway.bodies import Part
from gateway.responses.bodies import Item

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def named(items: Sequence[Item], taken: Collection[str | None]) -> list[Item]:
    """Return the items with unique ids. An item gets a new id if it has none, if its id is in `taken`, or if an earlier
    item has the same id."""
    seen, found = set(taken), []
    for item in items:
        if item.id is None or item.id in seen:
            item = item.model_copy(update={"id": f"{_PREFIXES.get(item.type, 'item')}_{uuid.uuid4().hex}"})
        seen.add(item.id)
        found.append(item)
    return found


@dataclass(frozen=True)
class Page:
    """Request for one page of a list of items."""

    limit: int
    """Maximum number of items of the page."""
    order: Literal["asc", "desc"]
    """Order of the items in the list. "asc": the oldest item is first. "desc": the newest item is first."""
    after: str | None
    """Id of the item that precedes the page in the chosen order. None: the page begins with the first item."""

    def of(self, items: Sequence[Item]) -> Object:
        """Return the page. `items` is the whole list with the oldest item first. Raises InvalidArgumentError if `after`
        is not the id of an item."""
        ordered = items if self.order == "asc" else items[::-1]
        start = 0
        if self.after is not None:
            ids = [item.id for item in ordered]
            if self.after not in ids:
                raise InvalidArgumentError(
                    f"after = {self.after!r:.80} is not an item of the response: use an id of its list"
                )
            start = ids.index(self.after) + 1
        found = ordered[start : start + self.limit]
        return {
            "object": "list",
            "data": [_listed(item) for item in found],
            "first_id": found[0].id if found else None,
            "last_id": found[-1].id if found else None,
            "has_more": start + self.limit < len(ordered),
        }


def _listed(item: Item) -> Object:
    """Return an item as the lists of OpenAI's API have it."""
    common: Object = {"id": item.id, "type": item.type, "status": item.status or "completed"}
    match item.type:
        case "function_call":
            return common | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments or "{}"}
        case "function_call_output":
            output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
            return common | {"call_id": item.call_id, "output": output}
        case "reasoning":
            return common | {"summary": [], "content": _parts(item.content, "reasoning_text")}
    kind = "output_text" if item.role == "assistant" else "input_text"
    return common | {"role": item.role, "content": _parts(item.content, kind)}


def _parts(content: str | Sequence[Part] | None, kind: str) -> list[Object]:
    parts = [Part(type=kind, text=content)] if isinstance(content, str) else content or ()
    more: Object = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [
        {"type": "refusal", "refusal": part.refusal or ""}
        if part.type == "refusal"
        else {"type": kind, "text": part.text or ""} | more
        for part in parts
    ]

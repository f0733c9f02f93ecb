"""How families of models write calls of tools, and which of them a model's chat template belongs to. Pure."""

import re
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls."""

    name: str
    begin: str
    """Text that calls begin with."""
    end: str = ""
    """Text that calls end with; empty: each ends with its JSON."""
    is_bare: bool = False
    """Whether an answer may also begin with a call's JSON at once."""
    is_all: bool = False
    """Whether an answer is a JSON list of calls and nothing else."""
    is_prompted: bool = False
    """Whether the tools are told in the system's message, because the chat template does not take them."""
    markers: tuple[str, ...] = ()
    """Texts that say where calls are, and may be special tokens, which have no text of their own."""
    has_short_ids: bool = False
    """Whether the chat template takes ids of nine letters and digits only."""


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", markers=("<tool_call>", "</tool_call>"))
LLAMA3 = CallFormat("llama3", "<|python_tag|>", is_bare=True, markers=("<|python_tag|>",))
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), has_short_ids=True)
SMOLLM2 = CallFormat("smollm2", "<tool_call>", "</tool_call>", is_prompted=True)
OBLIGED = CallFormat("obliged", "[", is_bare=True, is_all=True)
"""How a model writes calls that its output is constrained to."""
FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL, SMOLLM2)}
FORMAT_NAMES = ("auto", *FORMATS, "none")
"""What may be asked for: a format by its name, none at all, or whatever the chat template says."""

_TAKES_TOOLS = re.compile(r"\btools\b")
_SIGNS = (
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3),
    ("Environment: ipython", LLAMA3),
    ("<tool_call>", HERMES),
)
"""What the template of a family mentions; the first that is found counts."""


def format_of(template: str, asked: str = "auto") -> CallFormat | None:
    """Return the format of a model with this chat template, or the one that is asked for by name; None when the model
    cannot be told of tools. Raises ConfigError for a name that there is not."""
    if asked not in FORMAT_NAMES:
        raise ConfigError(f"tool format {asked!r} is unknown: use one of {', '.join(FORMAT_NAMES)}")
    if asked != "auto":
        return FORMATS.get(asked)
    if _TAKES_TOOLS.search(template):
        return next((found for sign, found in _SIGNS if sign in template), HERMES)
    return SMOLLM2 if "<|im_start|>" in template else None

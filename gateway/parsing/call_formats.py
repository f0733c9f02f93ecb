"""Formats in which model families write tool calls. The format of a model is recognized by its chat template. Pure."""

import re
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class CallFormat:
    """Format in which a model family writes tool calls."""

    name: str
    begin: str
    """Text that calls begin with."""
    end: str = ""
    """Text that calls end with; empty: a call ends at the end of its JSON."""
    is_bare: bool = False
    """True if an answer may also begin directly with a call's JSON."""
    is_all: bool = False
    """True if an answer is a JSON list of calls and nothing else."""
    is_prompted: bool = False
    """True if the tools are described in the system message, because the chat template does not take them."""
    markers: tuple[str, ...] = ()
    """Texts that mark calls. They may be special tokens, which have no text of their own."""
    has_short_ids: bool = False
    """True if the chat template takes only ids of nine letters and digits."""


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", markers=("<tool_call>", "</tool_call>"))
LLAMA3 = CallFormat("llama3", "<|python_tag|>", is_bare=True, markers=("<|python_tag|>",))
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), has_short_ids=True)
SMOLLM2 = CallFormat("smollm2", "<tool_call>", "</tool_call>", is_prompted=True)
OBLIGED = CallFormat("obliged", "[", is_bare=True, is_all=True)
"""Format of calls when the model's output is constrained to calls."""
FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL, SMOLLM2)}
FORMAT_NAMES = ("auto", *FORMATS, "none")
"""Names of formats for the configuration: a format's name, "none", or "auto" for the format of the chat template."""

_TAKES_TOOLS = re.compile(r"\btools\b")
_SIGNS = (
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3),
    ("Environment: ipython", LLAMA3),
    ("<tool_call>", HERMES),
)
"""Texts in the chat templates of families, with the format. The first text that the template contains decides."""


def format_of(template: str, asked: str = "auto") -> CallFormat | None:
    """Return the format with the name `asked`; for "auto", the format of a model with this chat template. Return None
    if the model cannot use tools. Raises ConfigError for an unknown name."""
    if asked not in FORMAT_NAMES:
        raise ConfigError(f"tool format {asked!r} is unknown: use one of {', '.join(FORMAT_NAMES)}")
    if asked != "auto":
        return FORMATS.get(asked)
    if _TAKES_TOOLS.search(template):
        return next((found for sign, found in _SIGNS if sign in template), HERMES)
    return SMOLLM2 if "<|im_start|>" in template else None

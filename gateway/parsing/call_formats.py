"""Formats in which model families write tool calls. The format of a model is recognized by its chat template. The
functions have no side effects."""

import re
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class CallFormat:
    """Format in which a model family writes tool calls."""

    name: str
    begin: str
    """Text with which tool calls begin."""
    end: str = ""
    """Text with which tool calls end. Empty: a call ends with its JSON."""
    is_bare: bool = False
    """True if the output may also begin directly with the JSON of a call, without the text `begin`."""
    is_all: bool = False
    """True if the whole output is a JSON list of calls."""
    is_prompted: bool = False
    """True if the tools are described in the system message, because the model's chat template does not support
    tools."""
    markers: tuple[str, ...] = ()
    """Texts that mark tool calls in the output. If a text is a special token of the model, the detokenizer does not
    normally output it."""
    has_short_ids: bool = False
    """True if the chat template accepts only call ids of exactly nine letters and digits."""


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", markers=("<tool_call>", "</tool_call>"))
LLAMA3 = CallFormat("llama3", "<|python_tag|>", is_bare=True, markers=("<|python_tag|>",))
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), has_short_ids=True)
SMOLLM2 = CallFormat("smollm2", "<tool_call>", "</tool_call>", is_prompted=True)
OBLIGED = CallFormat("obliged", "[", is_bare=True, is_all=True)
"""Format of tool calls if the model must call a tool. The output is then constrained to a JSON list of calls."""
FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL, SMOLLM2)}
FORMAT_NAMES = ("auto", *FORMATS, "none")
"""Values of the setting for the format of tool calls: the name of a format, "none", or "auto". "auto" selects the
format by the model's chat template."""

_TAKES_TOOLS = re.compile(r"\btools\b")
_SIGNS = (
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3),
    ("Environment: ipython", LLAMA3),
    ("<tool_call>", HERMES),
)
"""Pairs of a text in chat templates and the format of tool calls of the models with such templates. The first pair
whose text occurs in the template is used."""


def format_of(template: str, asked: str = "auto") -> CallFormat | None:
    """Return the format of tool calls with the name `asked`. "auto" selects the format by the model's chat template
    `template`. Return None if the model cannot call tools. Raises ConfigError for an unknown name."""
    if asked not in FORMAT_NAMES:
        raise ConfigError(f"tool format {asked!r} is unknown: use one of {', '.join(FORMAT_NAMES)}")
    if asked != "auto":
        return FORMATS.get(asked)
    if _TAKES_TOOLS.search(template):
        return next((found for sign, found in _SIGNS if sign in template), HERMES)
    return SMOLLM2 if "<|im_start|>" in template else None

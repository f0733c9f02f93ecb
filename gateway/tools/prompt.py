"""Describes tools in the system message, with the text that SmolLM2's instruct models were trained on."""

import json
from collections.abc import Sequence
from typing import Any

_PROMPT = (
    "You are an expert in composing functions. You are given a question and a set of possible functions. \n"
    "Based on the question, you will need to make one or more function/tool calls to achieve the purpose. \n"
    "If none of the functions can be used, point it out and refuse to answer. \n"
    "If the given question lacks the parameters required by the function, also point it out.\n"
    "\n"
    "You have access to the following tools:\n"
    "<tools>{tools}</tools>\n"
    "\n"
    "The output MUST strictly adhere to the following format, and NO other text MUST be included.\n"
    "The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, "
    "please make the tool calls an empty list '[]'.\n"
    "<tool_call>[\n"
    '{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},\n'
    "... (more tool calls as required)\n"
    "]</tool_call>"
)
"""Text from the documentation of SmolLM2, including its spaces. It must not be changed, because the model was trained
on exactly this text."""


def prompted(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat in which tools, tool calls and tool results are text. The tools are described before the chat's own
    system message. A call is written as the model writes it. The result of a tool becomes a message of the user."""
    chat = [_as_text(message) for message in messages]
    if not tools:
        return chat
    told = _PROMPT.format(tools=json.dumps(tools, ensure_ascii=False))
    if chat and chat[0]["role"] == "system":
        told, chat = f"{told}\n\n{chat[0]['content']}", chat[1:]
    return [{"role": "system", "content": told}, *chat]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        written = json.dumps([each["function"] for each in calls], ensure_ascii=False)
        text = f"<tool_call>{written}</tool_call>"
        return {"role": message["role"], "content": f"{message['content']}\n{text}" if message["content"] else text}
    return {"role": message["role"], "content": message["content"]}

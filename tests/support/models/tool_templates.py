"""Chat templates with tools in the style of each family, and tokenizers that use them."""

from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from baton.text.tokenizer import Tokenizer
from tests.support.models.tokenizers import write_folder

_LINE = "{{ '\\n' }}"
"""Jinja expression for a newline that Jinja does not strip as part of the template's own layout."""
_CHATML = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{%- endfor %}<|im_end|>\n{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
HERMES = (
    "{%- if tools %}<|im_start|>system\n# Tools\n<tools>{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}\n"
    "</tools>\nAnswer in <tool_call></tool_call>.<|im_end|>\n{%- endif %}" + _CHATML
)
THINKING = HERMES.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
"""Template whose prompt ends within the reasoning section."""
MAY_THINK = HERMES.replace(
    "<|im_start|>assistant\n",
    "<|im_start|>assistant\n{%- if enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}",
)
LLAMA3 = (
    "<s>{%- if tools %}system: Environment: ipython. Tools: {{ tools | tojson }}</s>{%- endif %}"
    "{%- for message in messages %}{%- if message.tool_calls %}"
    '<s>assistant: {"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}</s>'
    "{%- elif message.role == 'tool' %}<s>ipython: {{ message.content | tojson }}</s>"
    "{%- else %}<s>{{ message.role }}: {{ message.content }}</s>{%- endif %}{%- endfor %}<s>assistant: "
)
MISTRAL = (
    "<s>{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for message in messages %}{%- if message.tool_calls %}[TOOL_CALLS] ["
    "{%- for call in message.tool_calls %}{%- if call.id | length != 9 %}"
    '{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}'
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{%- endfor %}]</s>"
    "{%- elif message.role == 'tool' %}{%- if message.tool_call_id | length != 9 %}"
    '{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}'
    '[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- else %}[INST] {{ message.content }}[/INST]{%- endif %}{%- endfor %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "smollm2": SMOLLM2}
SPECIAL = ("<s>", "</s>", "[TOOL_CALLS]", "<|python_tag|>")
"""Special tokens, which have no text. Their ids start at 97."""


def letters(text: str) -> list[tuple[int, str]]:
    """Return a text as the `words` of a ScriptedOrchestrator: one token per letter, with the tokenizer's ids."""
    return [(95 if letter == "\n" else ord(letter) - 32, letter) for letter in text]


def tool_tokenizer(folder: Path, template: str) -> Tokenizer:
    """Return a tokenizer with printable ASCII characters, newline, special tokens and the given chat template."""
    vocab = {chr(32 + index): index for index in range(95)} | {"\n": 95, "?": 31, "<unk>": 96}
    vocab |= {token: 97 + index for index, token in enumerate(SPECIAL)}
    core = Core(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return Tokenizer.load(write_folder(folder, core, chat_template=template.replace("\n", _LINE)))

"""Chats in the format of each model family: its special tokens, its template, and conversations as its template renders
them.

Templates use the families' published formats and the same Jinja features as the originals: filters, loops with state,
exceptions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from tests.support.models.tokenizers import sentencepiece_core, write_folder

Messages = list[dict[str, str]]

SYSTEM: Messages = [{"role": "system", "content": "Be brief."}]
QUESTION: Messages = [{"role": "user", "content": "Hello, wörld"}]
TURNS: Messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b c"},
    {"role": "user", "content": "d"},
]


@dataclass(frozen=True)
class ChatFamily:
    """Chat format of a model family."""

    tokenizer_class: str
    """Class name of the tokenizer in its tokenizer_config.json."""
    special: tuple[str, ...]
    """Special tokens. The first two mark the begin and the end of a text."""
    template: str
    written: tuple[str, str, str]
    """Rendered conversations QUESTION, SYSTEM + QUESTION, and SYSTEM + TURNS, each followed by the prompt for an
    answer."""
    make_core: Callable[[], Core]
    """Creates the tokenizer without these special tokens."""

    def write(self, folder: Path, *, in_config: bool = False) -> Path:
        """Write the tokenizer's files, and return the folder. The template is stored in a separate file or, with
        `in_config`, in tokenizer_config.json."""
        core = self.make_core()
        core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in self.special])
        bos, eos = self.special[:2]
        fields = {"tokenizer_class": self.tokenizer_class, "bos_token": bos, "eos_token": eos}
        if in_config:
            return write_folder(folder, core, chat_template=self.template, **fields)
        (folder / "chat_template.jinja").write_text(self.template)
        return write_folder(folder, core, **fields)


def _gemma_core() -> Core:
    """Return a Gemma style pipeline over single bytes and letters: spaces become marks, no mark is added at the start,
    and unknown characters fall back to bytes."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", *"abcdehlor", "<start_of_turn>", "<end_of_turn>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Core(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def _byte_level_core() -> Core:
    """Return a GPT-2 style pipeline over single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


_LLAMA3_TURN = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
_LLAMA3_ANSWER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_HELLO = "Hello, wörld"

LLAMA3 = ChatFamily(
    tokenizer_class="PreTrainedTokenizerFast",
    special=("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    template=(
        "{%- set turn = '<|start_header_id|>%s<|end_header_id|>\\n\\n' -%}"
        "{{- bos_token }}{%- for message in messages %}"
        "{{- turn % message['role'] + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- turn % 'assistant' }}{%- endif %}"
    ),
    written=(
        f"<|begin_of_text|>{_LLAMA3_TURN.format('user', _HELLO)}{_LLAMA3_ANSWER}",
        "<|begin_of_text|>"
        f"{_LLAMA3_TURN.format('system', 'Be brief.')}{_LLAMA3_TURN.format('user', _HELLO)}{_LLAMA3_ANSWER}",
        f"<|begin_of_text|>{_LLAMA3_TURN.format('system', 'Be brief.')}{_LLAMA3_TURN.format('user', 'a')}"
        f"{_LLAMA3_TURN.format('assistant', 'b c')}{_LLAMA3_TURN.format('user', 'd')}{_LLAMA3_ANSWER}",
    ),
    make_core=_byte_level_core,
)

MISTRAL = ChatFamily(
    tokenizer_class="LlamaTokenizer",
    special=("<s>", "</s>", "[INST]", "[/INST]"),
    template=(
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] + '\\n\\n' %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
        "{{- bos_token }}{%- for message in messages %}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
        "{%- if message['role'] == 'user' %}"
        "{{- '[INST] ' + (system if loop.last else '') + message['content'] + ' [/INST]' }}"
        "{%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
    ),
    written=(
        f"<s>[INST] {_HELLO} [/INST]",
        f"<s>[INST] Be brief.\n\n{_HELLO} [/INST]",
        "<s>[INST] a [/INST] b c</s>[INST] Be brief.\n\nd [/INST]",
    ),
    make_core=sentencepiece_core,
)

_CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def _chatml(*turns: tuple[str, str]) -> str:
    spelled = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{spelled}<|im_start|>assistant\n"


_BRIEF, _TURNS = ("system", "Be brief."), (("user", "a"), ("assistant", "b c"), ("user", "d"))

QWEN2 = ChatFamily(
    tokenizer_class="Qwen2Tokenizer",
    special=("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    template=(
        "{%- if messages[0]['role'] != 'system' %}"
        "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}" + _CHATML
    ),
    written=(
        _chatml(("system", "You are a helpful assistant."), ("user", _HELLO)),
        _chatml(_BRIEF, ("user", _HELLO)),
        _chatml(_BRIEF, *_TURNS),
    ),
    make_core=_byte_level_core,
)

QWEN3 = ChatFamily(
    tokenizer_class="Qwen2Tokenizer",
    special=("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"),
    template=(
        _CHATML + "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    ),
    written=(_chatml(("user", _HELLO)), _chatml(_BRIEF, ("user", _HELLO)), _chatml(_BRIEF, *_TURNS)),
    make_core=_byte_level_core,
)

GEMMA3 = ChatFamily(
    tokenizer_class="GemmaTokenizer",
    special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    template=(
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
        "{%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- set turns = messages[1:] -%}"
        "{%- else -%}{%- set prefix = '' -%}{%- set turns = messages -%}{%- endif -%}"
        "{%- for message in turns -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
        "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
        "{{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}"
        "{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
    ),
    written=(
        f"<bos><start_of_turn>user\n{_HELLO}<end_of_turn>\n<start_of_turn>model\n",
        f"<bos><start_of_turn>user\nBe brief.\n\n{_HELLO}<end_of_turn>\n<start_of_turn>model\n",
        "<bos><start_of_turn>user\nBe brief.\n\na<end_of_turn>\n<start_of_turn>model\nb c<end_of_turn>\n"
        "<start_of_turn>user\nd<end_of_turn>\n<start_of_turn>model\n",
    ),
    make_core=_gemma_core,
)

_PHI3_BRIEF = "<|system|>\nBe brief.<|end|>\n"

PHI3 = ChatFamily(
    tokenizer_class="LlamaTokenizer",
    special=("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    template=(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    written=(
        f"<|user|>\n{_HELLO}<|end|>\n<|assistant|>\n",
        f"{_PHI3_BRIEF}<|user|>\n{_HELLO}<|end|>\n<|assistant|>\n",
        f"{_PHI3_BRIEF}<|user|>\na<|end|>\n<|assistant|>\nb c<|end|>\n<|user|>\nd<|end|>\n<|assistant|>\n",
    ),
    make_core=sentencepiece_core,
)

_PHI4_TURN = "<|im_start|>{}<|im_sep|>{}<|im_end|>"
_PHI4_ANSWER = "<|im_start|>assistant<|im_sep|>"

PHI4 = ChatFamily(
    tokenizer_class="GPT2Tokenizer",
    special=("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|im_sep|>"),
    template=(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] }}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
    ),
    written=(
        _PHI4_TURN.format("user", _HELLO) + _PHI4_ANSWER,
        _PHI4_TURN.format(*_BRIEF) + _PHI4_TURN.format("user", _HELLO) + _PHI4_ANSWER,
        "".join(_PHI4_TURN.format(*turn) for turn in (_BRIEF, *_TURNS)) + _PHI4_ANSWER,
    ),
    make_core=_byte_level_core,
)

FALCON = ChatFamily(
    tokenizer_class="PreTrainedTokenizerFast",
    special=("<|startoftext|>", "<|endoftext|>"),
    template=(
        "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
        "{{ {'user': 'User', 'assistant': 'Falcon', 'system': 'System'}[message['role']] + ': ' }}"
        "{{ message['content'] | trim }}{% endfor %}{% if add_generation_prompt %}{{ '\\nFalcon:' }}{% endif %}"
    ),
    written=(
        f"User: {_HELLO}\nFalcon:",
        f"System: Be brief.\nUser: {_HELLO}\nFalcon:",
        "System: Be brief.\nUser: a\nFalcon: b c\nUser: d\nFalcon:",
    ),
    make_core=_byte_level_core,
)

CHATS = {
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "phi4": PHI4,
    "falcon": FALCON,
}
"""Chat formats by family. OPT has no chat format."""
CONVERSATIONS = (QUESTION, SYSTEM + QUESTION, SYSTEM + TURNS)
"""Conversations in the order of `ChatFamily.written`."""

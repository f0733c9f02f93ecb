"""Fields of the OpenAI, vLLM and SGLang APIs that Baton does not support and that would change the answer. Requests
with such fields are refused.

Other unknown fields are ignored.
"""

from collections.abc import Mapping

from pydantic import BaseModel

from baton.errors import InvalidArgumentError

_NOTHING: tuple[object, ...] = (False, "", [], {})
"""Values with which an unsupported field has no effect, so that the request is accepted. They apply to fields that are
not in `_NOTHING_OF`."""
_NOTHING_OF: Mapping[str, tuple[object, ...]] = {
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "modalities": ([], ["text"]),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
}
"""Values by field name. With one of its values, an unsupported field has no effect, so that the request is accepted."""
UNSUPPORTED: Mapping[str, str] = {
    "add_special_tokens": "the tokenizer and the chat template say which",
    "allowed_token_ids": "use logit_bias or structured_outputs",
    "audio": "answers are text",
    "bad_words": "use logit_bias",
    "chat_template": "the model's own renders all chats",
    "custom_logit_processor": "use logit_bias",
    "documents": "put them into a message",
    "early_stopping": "there is no beam search",
    "echo": "an answer does not repeat its prompt",
    "ebnf": "use structured_outputs.grammar",
    "functions": "tools is their new name",
    "grammar": "use structured_outputs.grammar",
    "include_reasoning": "reasoning is always sent",
    "input_embeds": "send text or token ids",
    "json_schema": "use response_format",
    "length_penalty": "there is no beam search",
    "logits_processors": "use logit_bias",
    "logprob_token_ids": "use top_logprobs",
    "lora_path": "there are no adapters",
    "modalities": "answers are text",
    "no_stop_trim": "a stop string is not part of the text",
    "prompt_embeds": "send text or token ids",
    "prompt_logprobs": "use echo and logprobs of completions",
    "regex": "use structured_outputs.regex",
    "return_hidden_states": "there are none to return",
    "return_token_ids": "answers are text",
    "return_tokens_as_token_ids": "tokens are named by their text",
    "separate_reasoning": "reasoning is always separate",
    "session_params": "send the whole conversation",
    "skip_special_tokens": "special tokens are not part of the text",
    "stop_regex": "use stop",
    "suffix": "a text is completed at its end only",
    "thinking_token_budget": "use max_tokens",
    "truncate_prompt_tokens": "send a shorter prompt",
    "use_beam_search": "there is no beam search",
    "web_search_options": "nothing is searched",
}
"""Unsupported fields. The value of each field names the replacement, or the reason why the field is not supported."""


def refuse_unsupported(body: BaseModel, *, adds_special_tokens: bool) -> None:
    """Raise InvalidArgumentError if the body has a field that requests an unsupported feature. `adds_special_tokens` is
    true if the tokenizer adds its special tokens at the start of the prompt."""
    for name, value in (body.model_extra or {}).items():
        if name not in UNSUPPORTED or value is None:
            continue
        nothing = (adds_special_tokens,) if name == "add_special_tokens" else _NOTHING_OF.get(name, _NOTHING)
        if not any(type(value) is type(each) and value == each for each in nothing):
            raise InvalidArgumentError(f"{name} is not supported: {UNSUPPORTED[name]}; leave it out")

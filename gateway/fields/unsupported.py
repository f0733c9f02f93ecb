"""Fields of other APIs (OpenAI, vLLM, SGLang, llama.cpp, TGI) that Baton does not support and that would change the
answer. Requests with such fields are refused. So are requests with a field that has another name on their path.

Other unknown fields are ignored.
"""

from collections.abc import Collection, Mapping

from pydantic import BaseModel

from gateway.errors import UnsupportedFieldError

_NOTHING: tuple[object, ...] = (False, "", [], {})
"""Values with which an unsupported field has no effect, so that the request is accepted. They apply to fields that are
not in `_NOTHING_OF`."""
_NOTHING_OF: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logprobs": (0, False),
    "mirostat": (0, False),
    "modalities": ([], ["text"]),
    "n_predict": (-1,),
    "n_probs": (0,),
    "repeat_penalty": (1,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "top_n_sigma": (-1,),
    "top_n_tokens": (0,),
    "truncation": ("disabled",),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
"""Values by field name. With one of its values, an unsupported field has no effect, so that the request is accepted."""
UNSUPPORTED: Mapping[str, str] = {
    "adapter_id": "there are no adapters",
    "add_generation_prompt": "use /v1/chat/completions",
    "add_special_tokens": "the tokenizer and the chat template say which",
    "allowed_token_ids": "use logit_bias or structured_outputs",
    "audio": "answers are text",
    "background": "the answer comes while the client waits",
    "bad_words": "use logit_bias",
    "best_of": "all choices are returned",
    "chat_template": "the model's own renders all chats",
    "continue_final_message": "use /v1/chat/completions",
    "conversation": "use previous_response_id of /v1/responses",
    "custom_logit_processor": "use logit_bias",
    "do_sample": "use temperature = 0",
    "documents": "put them into a message",
    "dry_multiplier": "use repetition_penalty",
    "dynatemp_range": "use temperature",
    "early_stopping": "there is no beam search",
    "ebnf": "use structured_outputs.grammar",
    "echo": "an answer does not repeat its prompt",
    "functions": "tools is their new name",
    "grammar": "use structured_outputs.grammar",
    "include_reasoning": "reasoning is always sent",
    "input_embeds": "send text or token ids",
    "instructions": "put them into the prompt, or into a message of the role system",
    "json_schema": "use response_format",
    "length_penalty": "there is no beam search",
    "logits_processors": "use logit_bias",
    "logprob_token_ids": "use top_logprobs",
    "lora_path": "there are no adapters",
    "mirostat": "use temperature and top_p",
    "modalities": "answers are text",
    "n_probs": "use logprobs",
    "no_stop_trim": "a stop string is not part of the text",
    "previous_response_id": "use /v1/responses",
    "prompt_embeds": "send text or token ids",
    "prompt_logprobs": "use echo and logprobs of completions",
    "regex": "use structured_outputs.regex",
    "return_full_text": "use echo of completions",
    "return_hidden_states": "there are none to return",
    "return_token_ids": "answers are text",
    "return_tokens_as_token_ids": "tokens are named by their text",
    "separate_reasoning": "reasoning is always separate",
    "session_params": "send the whole conversation",
    "skip_special_tokens": "special tokens are not part of the text",
    "stop_regex": "use stop",
    "suffix": "a text is completed at its end only",
    "thinking_token_budget": "use max_tokens",
    "tool_choice": "use /v1/chat/completions",
    "tools": "use /v1/chat/completions",
    "top_n_sigma": "use min_p",
    "top_n_tokens": "use logprobs",
    "truncate_prompt_tokens": "send a shorter prompt",
    "truncation": "nothing is dropped: send a shorter prompt",
    "typical_p": "use top_p",
    "use_beam_search": "there is no beam search",
    "watermark": "texts are not marked",
    "web_search_options": "nothing is searched",
    "xtc_probability": "use min_p",
}
"""Unsupported fields. The value of each field names the replacement, or the reason why the field is not supported."""
_SAME: tuple[tuple[str, ...], ...] = (
    ("include", "logprobs", "top_logprobs"),
    ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "n_predict"),
    ("messages", "input", "prompt"),
    ("min_tokens", "min_new_tokens"),
    ("repetition_penalty", "repeat_penalty"),
    ("response_format", "text"),
    ("seed", "random_seed"),
    ("stop", "stop_sequences"),
)
"""Fields that have the same purpose on different paths, or in other APIs. If a body has one of the fields, the others
are refused, and the error names the body's field."""
REFUSED = frozenset(UNSUPPORTED).union(*_SAME)
"""Names of the fields that a body may not have, unless its path supports them."""


def refuse_unsupported(body: BaseModel, *, adds_special_tokens: bool) -> None:
    """Raise UnsupportedFieldError if the body has a field that requests an unsupported feature, or that has another
    name on the body's path. `adds_special_tokens` is true if the tokenizer adds its special tokens at the start of the
    prompt."""
    for name, value in (body.model_extra or {}).items():
        reason = UNSUPPORTED.get(name) or _other_name(name, type(body).model_fields)
        if reason is None or value is None:
            continue
        nothing = (adds_special_tokens,) if name == "add_special_tokens" else _NOTHING_OF.get(name, _NOTHING)
        if not any(isinstance(value, bool) is isinstance(each, bool) and value == each for each in nothing):
            raise UnsupportedFieldError(f"{name} is not supported: {reason}; leave it out")


def _other_name(name: str, known: Collection[str]) -> str | None:
    """Return a text that names the field of the body which has the purpose of the field `name`; None if there is
    none."""
    if name == "prompt" and "instructions" in known:  # OpenAI's template of both
        return "use instructions and input"
    same = next((names for names in _SAME if name in names), ())
    return next((f"use {each}" for each in same if each in known), None)

"""Sampling parameters of a request. They are validated once, when a SamplingParams object is created.

Names and defaults are those of OpenAI's and vLLM's interfaces. `baton.modeling.forward.sampling` applies the
parameters.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from baton.errors import InvalidArgumentError
from baton.limits import (
    MAX_CHOICES,
    MAX_DRAFTS,
    MAX_FORM_BYTES,
    MAX_FORM_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

_FIELD = "sampling.structured_output"
_KINDS = ("json", "json_object", "regex", "grammar", "choice")
"""Names of the fields of StructuredOutput that restrict the output. Exactly one of them must be set."""
_ABOVE_ZERO = math.ulp(0.0)
_RANGES = (
    ("max_tokens", 0, math.inf, "use at least 1"),
    ("min_tokens", 0, math.inf, "use 0 or more"),
    ("temperature", 0, 100, "use 0 (greedy) to 100"),
    ("top_k", 0, math.inf, "use 0 (all tokens) or more"),
    ("top_p", _ABOVE_ZERO, 1, "use a value in (0, 1]"),
    ("min_p", 0, 1, "use a value in [0, 1]"),
    ("repetition_penalty", _ABOVE_ZERO, 100, "use a value in (0, 100]"),
    ("presence_penalty", -2, 2, "use a value in [-2, 2]"),
    ("frequency_penalty", -2, 2, "use a value in [-2, 2]"),
    ("seed", 0, 2**64 - 1, "use an unsigned 64-bit integer"),
    ("logprobs", 0, MAX_LOGPROBS, f"use 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"use 0 to {MAX_LOGPROBS}"),
    ("n", 1, MAX_CHOICES, f"use 1 to {MAX_CHOICES}"),
    ("num_drafts", 0, MAX_DRAFTS, f"use 0 to {MAX_DRAFTS}"),
)
"""Permitted ranges of numeric parameters, as (field, minimum, maximum, remedy for the error message)."""


@dataclass(frozen=True)
class StructuredOutput:
    """Form that a request's output must have. Exactly one of `json`, `json_object`, `regex`, `grammar` and `choice`
    must be set. Raises InvalidArgumentError otherwise."""

    json: str | None = None
    """JSON schema, as JSON text. The output is a JSON value that is valid according to the schema."""
    json_object: bool = False
    """True: the output is a JSON object of any form."""
    regex: str | None = None
    """Regular expression that matches the whole output. Look-around and back references are not supported."""
    grammar: str | None = None
    """Context-free grammar in Lark's notation or in GBNF. The output is a text that its start symbol derives."""
    choice: tuple[str, ...] = ()
    """Permitted outputs. The output is exactly one of these texts. At most 1,024."""
    compiled_bytes: int = field(default=0, compare=False)
    """Size in bytes of this structured output after compilation, as measured by the orchestrator. 0: not measured."""

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            known = ", ".join(_KINDS)
            raise InvalidArgumentError(f"{_FIELD} sets {' and '.join(given) or 'nothing'}: set one of {known}")
        check_choice_length(len(self.choice))
        value = getattr(self, given[0])
        texts: Sequence[str] = value if given[0] == "choice" else () if given[0] == "json_object" else (value,)
        if not all(texts):
            raise InvalidArgumentError(f"{_FIELD}.{given[0]} is empty: describe an output")
        num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if num_bytes > MAX_FORM_BYTES:
            raise InvalidArgumentError(
                f"{_FIELD}.{given[0]} has {num_bytes} bytes: the limit is {MAX_FORM_BYTES}; shorten it"
            )

    @property
    def kind(self) -> str:
        """Return the name of the field that is set, for example "json"."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False, ()))


StructuredOption = StructuredOutput | Mapping[str, Any]
"""Value of the sampling option `structured_output`: a StructuredOutput, or a mapping of its fields. In a mapping,
`json` may be the schema itself instead of its JSON text."""


def structured_from_option(option: StructuredOption | None) -> StructuredOutput | None:
    """Convert the sampling option `structured_output` to a StructuredOutput. None stays None. Raises
    InvalidArgumentError for an unknown field, and for a value of the wrong type."""
    if option is None or isinstance(option, StructuredOutput):
        return option
    values = {name: value for name, value in option.items() if value is not None}
    unknown = values.keys() - set(_KINDS)
    if unknown:
        known = ", ".join(_KINDS)
        raise InvalidArgumentError(f"{_FIELD}.{min(map(str, unknown))} is unknown: set one of {known}")
    schema = values.get("json")
    if schema is not None and not isinstance(schema, str):
        values["json"] = _as_json(schema)
    for name in ("regex", "grammar"):
        if not isinstance(values.get(name), str | None):
            raise InvalidArgumentError(f"{_FIELD}.{name} is {values[name]!r:.40}: use a string")
    if not isinstance(values.get("json_object", False), bool):
        raise InvalidArgumentError(f"{_FIELD}.json_object is {values['json_object']!r:.40}: use true, or leave it out")
    texts = values.get("choice", ())
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgumentError(f"{_FIELD}.choice is {texts!r:.40}: use a list of strings")
    return StructuredOutput(**{**values, "choice": tuple(texts)})


def check_choice_length(num_choices: int) -> None:
    """Raise InvalidArgumentError if `num_choices`, the number of texts in the field `choice` of a structured output, is
    too large. Called before the texts are copied."""
    if num_choices > MAX_FORM_CHOICES:
        raise InvalidArgumentError(f"{_FIELD}.choice has {num_choices} entries: use at most {MAX_FORM_CHOICES}")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request: how tokens are selected, and when the output ends. Raises
    InvalidArgumentError for an invalid field."""

    max_tokens: int = 256
    """Maximum number of output tokens (at least 1). 0 is permitted if `prompt_logprobs` is set: the request then
    returns only the logprobs of the prompt."""
    min_tokens: int = 0
    """Minimum number of output tokens. Before this number is reached, end-of-sequence tokens and stop token ids are not
    sampled, and stop strings do not end the stream."""
    temperature: float = 0.0
    """Sampling temperature (0 to 100), by which logits are divided. 0: greedy sampling."""
    top_k: int = 0
    """Number of most likely tokens from which a token is sampled. 0: all tokens."""
    top_p: float = 1.0
    """Cumulative probability in (0, 1] for nucleus sampling. Tokens are sampled from the smallest set of most likely
    tokens whose total probability reaches this value. 1: all tokens."""
    min_p: float = 0.0
    """Minimum probability of a token, as a fraction in [0, 1] of the most likely token's probability. Less likely
    tokens are not sampled. 0: all tokens."""
    repetition_penalty: float = 1.0
    """Penalty in (0, 100] for tokens that occur in the prompt or the output. Positive logits of these tokens are
    divided by it, and negative ones are multiplied by it. 1: no penalty."""
    presence_penalty: float = 0.0
    """Value in [-2, 2] that is subtracted once from the logit of each token that occurs in the output. 0: no
    penalty."""
    frequency_penalty: float = 0.0
    """Value in [-2, 2] that is subtracted from the logit of a token for each of its occurrences in the output. 0: no
    penalty."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Values in [-100, 100] that are added to the logits, by token id. At most 1,024 entries."""
    seed: int = 0
    """Seed of the sampling, an unsigned integer of 64 bits. The sampling noise depends only on the seed, the output
    position and the token id."""
    stop: tuple[str, ...] = ()
    """Stop strings, which end the stream when they occur in the output. At most 16, with 1 to 1,024 characters each."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the stream, in addition to the model's end-of-sequence tokens. At most 1,024. Duplicates are
    removed."""
    include_stop_str_in_output: bool = False
    """True: the output text includes the stop string, or the text of the stop token, that ended the stream."""
    ignore_eos: bool = False
    """True: end-of-sequence tokens of the model do not end the output."""
    logprobs: int | None = None
    """Number of most likely tokens (0 to 20) whose logprobs are returned for each output token, in addition to the
    logprob of the token itself. None: no logprobs are returned."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens (0 to 20) whose logprobs are returned for each prompt token, in addition to the
    logprob of the token itself. None: no logprobs are returned.

    The first prompt token has no logprobs. The logprobs are those of the model, without penalties and biases.
    """
    n: int = 1
    """Number of choices, which are independent outputs for the same prompt (1 to 64). With greedy sampling, all choices
    are equal."""
    num_drafts: int | None = None
    """Maximum number of draft tokens (0 to 8) that a step verifies for each choice, if the server uses speculative
    decoding. None: the server chooses the number."""
    structured_output: StructuredOutput | None = None
    """Form that the output must have, for example a JSON schema. None: any text. The output ends when the form is
    complete. It ends earlier if `max_tokens`, a stop string or a stop token id ends it."""

    def __post_init__(self) -> None:
        check_list_lengths(len(self.stop), len(self.stop_token_ids), len(self.logit_bias))
        for name, least, most, remedy in _RANGES:
            value = getattr(self, name)
            is_off = value is None and name.endswith(("logprobs", "drafts"))
            _require(is_off or least <= value <= most, name, value, remedy)
        has_purpose = self.max_tokens > 0 or self.prompt_logprobs is not None
        _require(has_purpose, "max_tokens", self.max_tokens, "use at least 1; 0 needs the prompt's logprobs")
        limit = f"sampling.max_tokens is {self.max_tokens}"
        _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, limit)
        for token_id, bias in self.logit_bias.items():
            _require(token_id >= 0, "logit_bias", token_id, "keys are token ids")
            _require(-100 <= bias <= 100, "logit_bias", bias, "use values in [-100, 100]")
        self._check_stops()
        self._check_structured()

    def of_choice(self, choice: int) -> "SamplingParams":
        """Return the parameters with which the choice of index `choice` is sampled, as if it were a request with `n` =
        1. The seed is `seed` + `choice`. Only choice 0 returns logprobs of the prompt. Values are not validated again,
        and lists are shared instead of copied."""
        made = copy.copy(self)  # copy.copy does not call __post_init__
        object.__setattr__(made, "n", 1)
        object.__setattr__(made, "seed", (self.seed + choice) % 2**64)
        object.__setattr__(made, "prompt_logprobs", self.prompt_logprobs if choice == 0 else None)
        return made

    def _check_stops(self) -> None:
        for index, stop in enumerate(self.stop):
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise InvalidArgumentError(
                    f"sampling.stop[{index}] has {len(stop)} characters: use 1 to {MAX_STOP_CHARS}"
                )
        for token_id in self.stop_token_ids:
            _require(token_id >= 0, "stop_token_ids", token_id, "use token ids")
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))

    def _check_structured(self) -> None:
        for name in ("ignore_eos", "min_tokens"):
            if self.structured_output is not None and getattr(self, name):
                raise InvalidArgumentError(
                    f"sampling.{name} = {getattr(self, name)} with sampling.structured_output is out of range: the "
                    f"output ends where its form is complete; leave {name} out"
                )


def check_list_lengths(num_stops: int, num_stop_token_ids: int, num_biases: int) -> None:
    """Raise InvalidArgumentError if `stop`, `stop_token_ids` or `logit_bias` has too many entries. The arguments are
    the lengths of these lists, so that lists that are too long can be rejected before they are copied."""
    for name, length, most in (
        ("stop", num_stops, MAX_STOP_STRINGS),
        ("stop_token_ids", num_stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", num_biases, MAX_LOGIT_BIASES),
    ):
        if length > most:
            raise InvalidArgumentError(f"sampling.{name} has {length} entries: use at most {most}")


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments with the fields of SamplingParams. Arguments that are omitted have the defaults of
    SamplingParams."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    num_drafts: int | None
    structured_output: StructuredOption | None


def params_from_options(options: SamplingOptions) -> SamplingParams:
    """Create sampling parameters from keyword arguments. Raises InvalidArgumentError for an invalid value, and
    TypeError for an unknown name."""
    stop = options.get("stop", ())
    values: dict[str, Any] = {
        **options,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stop_token_ids": tuple(options.get("stop_token_ids", ())),
        "structured_output": structured_from_option(options.get("structured_output")),
    }
    return SamplingParams(**values)


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"sampling.{name} = {value!r} is out of range: {remedy}")


def _as_json(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{_FIELD}.json is not valid JSON: {error}: send a JSON schema") from error

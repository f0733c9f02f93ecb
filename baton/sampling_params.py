"""A request's sampling parameters, validated once, where they enter.

The names and defaults are those of OpenAI's and vLLM's interfaces. `baton.modeling.forward.sampling` applies them.
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
"""Fields of which one is set."""
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
"""(field, least value, largest value, remedy)."""


@dataclass(frozen=True)
class StructuredOutput:
    """The form that a request's output must have. Exactly one field is set; raises InvalidArgumentError otherwise."""

    json: str | None = None
    """A JSON schema, as JSON: the output is a JSON value that it allows."""
    json_object: bool = False
    """True: the output is a JSON object of any form."""
    regex: str | None = None
    """A regular expression that matches the whole output. Without look-around and back references."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, or in GBNF, whose start symbol derives the output."""
    choice: tuple[str, ...] = ()
    """Texts, one of which is the output. At most 1,024."""
    compiled_bytes: int = field(default=0, compare=False)
    """Bytes of the compiled form, as measured by the orchestrator; 0: not known."""

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
        """Return the name of the field that is set."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False, ()))


StructuredOption = StructuredOutput | Mapping[str, Any]
"""A StructuredOutput, or its fields as a mapping, whose schema may also be given as an object instead of JSON text."""


def structured_from_option(option: StructuredOption | None) -> StructuredOutput | None:
    """Return the value of the sampling option `structured_output`. Raises InvalidArgumentError for an unknown field
    and for a value of the wrong type."""
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
    """Raise InvalidArgumentError for a list of texts that is too long, before it is copied."""
    if num_choices > MAX_FORM_CHOICES:
        raise InvalidArgumentError(f"{_FIELD}.choice has {num_choices} entries: use at most {MAX_FORM_CHOICES}")


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when its stream ends. Raises InvalidArgumentError on a bad field."""

    max_tokens: int = 256
    """Output tokens, at most (>= 1); with `prompt_logprobs` 0 as well: the logprobs of the prompt alone, no output."""
    min_tokens: int = 0
    """Output tokens before which neither an end-of-sequence token nor a stop token id may be sampled, and in whose text
    no stop string ends the stream."""
    temperature: float = 0.0
    """Number that logits are divided by before sampling (<= 100); 0 is greedy."""
    top_k: int = 0
    """Number of most likely tokens that are kept; 0 keeps all."""
    top_p: float = 1.0
    """Probability, in (0, 1], that the kept tokens reach together: the smallest set of most likely ones is kept."""
    min_p: float = 0.0
    """Fraction, in [0, 1], of the most likely token's probability that a token needs to be kept."""
    repetition_penalty: float = 1.0
    """Penalty for tokens seen in prompt or output: divides their positive logits and multiplies negative ones; > 0."""
    presence_penalty: float = 0.0
    """Amount subtracted once from the logits of tokens seen in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Amount subtracted, for each occurrence, from the logits of tokens seen in the output; in [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Values in [-100, 100] to add to the logits of these token ids; at most 1,024 entries."""
    seed: int = 0
    """Unsigned 64 bits. The sampling noise is a function of (seed, output position, token id) alone."""
    stop: tuple[str, ...] = ()
    """Strings that end the stream. At most 16, each of 1 to 1,024 characters."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the stream, as the model's end-of-sequence tokens do. At most 1,024; each is kept once."""
    include_stop_str_in_output: bool = False
    """True: the text ends with the stop string, or the text of the stop token, that ended the stream."""
    ignore_eos: bool = False
    """True: the output continues after the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Number of most likely tokens to report with each output token's own logprob (0 to 20); None: no logprobs."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report with the logprob of each prompt token except the first (0 to 20), from the
    model's own distribution, without penalties and bias; None: no logprobs."""
    n: int = 1
    """Number of choices: independent outputs for one prompt (1 to 64). Greedy choices are all alike."""
    num_drafts: int | None = None
    """Most drafts that a step verifies for a choice (0 to 8), if the server speculates; None: the server chooses."""
    structured_output: StructuredOutput | None = None
    """Form that the output's tokens are constrained to; None: any text. The output ends where the form is complete, or
    earlier by `max_tokens`, a stop string or a stop token id."""

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
        """Return the parameters of one choice as those of a request with one choice: seed + `choice` is its seed, and
        only choice 0 scores the prompt. Nothing is validated again, and lists are shared, not copied."""
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
    """Raise InvalidArgumentError when one of the lists `stop`, `stop_token_ids` and `logit_bias` is too long. Takes
    their lengths, so that a caller can refuse a list of millions before it is copied."""
    for name, length, most in (
        ("stop", num_stops, MAX_STOP_STRINGS),
        ("stop_token_ids", num_stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", num_biases, MAX_LOGIT_BIASES),
    ):
        if length > most:
            raise InvalidArgumentError(f"sampling.{name} has {length} entries: use at most {most}")


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments; a field that is left out has SamplingParams' default."""

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
    """Return the sampling parameters. Raises InvalidArgumentError for a bad value, TypeError for an unknown one."""
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

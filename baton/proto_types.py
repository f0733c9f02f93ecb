"""Conversion between Baton's values and the protobuf messages that clients and servers exchange (proto/baton/v1). All
functions are pure.

Functions named `x_from_proto` validate their messages. Messages from hostile or newer peers may raise
InvalidArgumentError or VersionMismatchError, but never fail an assert.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from baton.errors import InvalidArgumentError, VersionMismatchError
from baton.results.completion import ModelInfo, Usage
from baton.results.prefill_trace import (
    Interval,
    Placement,
    PlacementTerms,
    PrefillTrace,
    PrefixFetch,
    RankTiming,
    WidthChoice,
    WidthOption,
)
from baton.results.request_list import RequestList, RequestStatus
from baton.results.timings import DraftCounts, SpeculationTrace, Timings
from baton.sampling_params import SamplingParams, StructuredOutput, check_choice_length, check_list_lengths
from baton.types import (
    DraftRound,
    FinishReason,
    Priority,
    SampledToken,
    TokenEvent,
    TokenLogprob,
    TokenOrigin,
    TokenRange,
)
from baton.v1 import common_pb2, generate_pb2, orchestrator_pb2, prefill_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def read(kind: type[T], message: Message, **converted: Any) -> T:
    """Create a value of the dataclass `kind` from a message. The fields in `converted` have the given values, and all
    other fields are copied from the message. Optional fields that are not set in the message get the dataclass's
    default."""
    copied = _copied_fields(kind, message.DESCRIPTOR, *converted)
    same = {name: getattr(message, name) for name, is_optional in copied if not is_optional or message.HasField(name)}
    return kind(**same, **converted)


@cache
def _copied_fields(kind: type[Any], descriptor: Descriptor, *converted: str) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a dataclass except `converted`, and whether each is optional on the wire."""
    names = [each.name for each in fields(kind) if each.name not in converted]
    return tuple([(name, descriptor.fields_by_name[name].containing_oneof is not None) for name in names])


def scalars(kind: type[Message], value: object) -> dict[str, Any]:
    """Return those fields of `value` that can be copied to a message of type `kind`, by name. These are the fields that
    also exist in the message and are not messages themselves."""
    names = [each.name for each in kind.DESCRIPTOR.fields if each.message_type is None]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def range_to_proto(tokens: TokenRange) -> common_pb2.TokenRange:
    """Convert a token range to a message."""
    return common_pb2.TokenRange(start=tokens.start, end=tokens.end)


def range_from_proto(message: common_pb2.TokenRange) -> TokenRange:
    """Convert a message to a token range. Raises InvalidArgumentError if the range ends before it starts."""
    if message.start > message.end:
        raise InvalidArgumentError(f"token range [{message.start}, {message.end}) is reversed: start must not be after")
    return TokenRange(message.start, message.end)


def sampled_to_proto(token: SampledToken) -> common_pb2.SampledToken:
    """Convert a sampled token to a message. Logprobs are sent in single precision."""
    if token.logprob is None and not token.top:  # nearly all tokens; each is converted several times
        return common_pb2.SampledToken(token_id=token.token_id)
    return common_pb2.SampledToken(
        token_id=token.token_id,
        logprob=token.logprob,
        top=[common_pb2.TokenLogprob(token_id=each.token_id, logprob=each.logprob) for each in token.top],
    )


def sampled_from_proto(message: common_pb2.SampledToken) -> SampledToken:
    """Convert a message to a sampled token. The token has logprobs only if the message contains them."""
    return SampledToken(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple([TokenLogprob(each.token_id, each.logprob) for each in message.top]) if message.top else (),
    )


def params_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Convert sampling parameters to a message. All fields are set explicitly, including those with default values."""
    structured = None if params.structured_output is None else _structured_to_proto(params.structured_output)
    return common_pb2.SamplingParams(**vars(params) | {"structured_output": structured})


def params_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Convert a message to sampling parameters. Raises InvalidArgumentError for invalid parameters. Lists that are too
    long are rejected before they are copied."""
    check_list_lengths(len(message.stop), len(message.stop_token_ids), len(message.logit_bias))
    return read(
        SamplingParams,
        message,
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        structured_output=(
            _structured_from_proto(message.structured_output) if message.HasField("structured_output") else None
        ),
    )


def _structured_to_proto(structured: StructuredOutput) -> common_pb2.StructuredOutput:
    if structured.choice:
        message = common_pb2.StructuredOutput(choice=common_pb2.TextChoice(texts=structured.choice))
    else:
        message = common_pb2.StructuredOutput(**{structured.kind: getattr(structured, structured.kind)})
    message.compiled_bytes = structured.compiled_bytes
    return message


def _structured_from_proto(message: common_pb2.StructuredOutput) -> StructuredOutput:
    check_choice_length(len(message.choice.texts))
    return read(StructuredOutput, message, choice=tuple(message.choice.texts))


def priority_from_proto(value: orchestrator_pb2.Priority.ValueType) -> Priority:
    """Convert the number of a priority to its value. UNSPECIFIED becomes STANDARD. Raises InvalidArgumentError for an
    unknown number."""
    if value == orchestrator_pb2.PRIORITY_UNSPECIFIED:
        return Priority.STANDARD
    try:
        return Priority(value)
    except ValueError as error:
        known = ", ".join(f"{each.value} ({each.name.lower()})" for each in Priority)
        raise InvalidArgumentError(f"priority = {value} is unknown: use {known}, or leave it out") from error


_FINISH_TO_PROTO: Mapping[FinishReason, generate_pb2.FinishReason.ValueType] = MappingProxyType(
    {reason: generate_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
)
_FINISH_FROM_PROTO = MappingProxyType({value: reason for reason, value in _FINISH_TO_PROTO.items()})


def finish_to_proto(finish: FinishReason | None) -> generate_pb2.FinishReason.ValueType:
    """Convert a finish reason to its number in messages. None, which means that the stream continues, becomes
    UNSPECIFIED."""
    return generate_pb2.FINISH_REASON_UNSPECIFIED if finish is None else _FINISH_TO_PROTO[finish]


def finish_from_proto(value: generate_pb2.FinishReason.ValueType) -> FinishReason | None:
    """Convert the number of a finish reason to its value. Return None for UNSPECIFIED, which means that the stream
    continues. Raises VersionMismatchError for an unknown number."""
    if value == generate_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    reason = _FINISH_FROM_PROTO.get(value)
    if reason is None:
        raise VersionMismatchError(f"finish reason {value} is unknown here: run one version of Baton on all sides")
    return reason


def event_to_proto(event: TokenEvent) -> generate_pb2.TokenEvent:
    """Convert a token event to a message."""
    return generate_pb2.TokenEvent(
        index=event.index,
        token=None if event.token is None else sampled_to_proto(event.token),
        text=event.text,
        unix_ns=event.unix_ns,
        finish=finish_to_proto(event.finish),
        error=event.error,
        choice=event.choice,
        prompt=[sampled_to_proto(token) for token in event.prompt],
        drafts=None if event.drafts is None else generate_pb2.DraftRound(**vars(event.drafts)),
        origin=None if event.origin is None else generate_pb2.TokenOrigin(**vars(event.origin)),
    )


def fits_columns(event: TokenEvent) -> bool:
    """Return whether `TokenColumns` has all fields of the event: a token without logprobs, and no other contents."""
    token = event.token
    if token is None or token.logprob is not None or token.top:
        return False
    return event.drafts is None and event.origin is None and not event.prompt and not event.error


def columns_to_proto(tokens: Sequence[tuple[int, TokenEvent]]) -> generate_pb2.TokenColumns:
    """Convert pairs of a stream's number and an event for which `fits_columns` is true to a message."""
    events = [event for _, event in tokens]
    return generate_pb2.TokenColumns(
        numbers=[number for number, _ in tokens],
        choices=[event.choice for event in events],
        indices=[event.index for event in events],
        token_ids=[event.token.token_id for event in events if event.token is not None],
        texts=[event.text for event in events],
        unix_ns=[event.unix_ns for event in events],
        finishes=[finish_to_proto(event.finish) for event in events],
    )


def columns_from_proto(message: generate_pb2.TokenColumns) -> Iterator[tuple[int, TokenEvent]]:
    """Yield the pairs of a stream's number and an event that were converted to this message. Raises
    InvalidArgumentError for columns of different lengths, and VersionMismatchError for a finish reason that this
    version does not support."""
    columns: list[Sequence[Any]] = [
        *(message.numbers, message.indices, message.token_ids, message.texts, message.unix_ns),
        *(message.finishes, message.choices),
    ]
    if len(lengths := set(map(len, columns))) > 1:
        raise InvalidArgumentError(f"tokens has columns of {sorted(lengths)} entries: send one for each token")
    for number, index, token_id, text, unix_ns, finish, choice in zip(*columns, strict=True):
        yield number, TokenEvent(index, SampledToken(token_id), text, unix_ns, finish_from_proto(finish), choice=choice)


def event_from_proto(message: generate_pb2.TokenEvent) -> TokenEvent:
    """Convert a message to a token event. Raises VersionMismatchError for a finish reason that this version does not
    support."""
    return TokenEvent(
        index=message.index,
        token=sampled_from_proto(message.token) if message.HasField("token") else None,
        text=message.text,
        unix_ns=message.unix_ns,
        finish=finish_from_proto(message.finish),
        error=message.error,
        choice=message.choice,
        prompt=tuple([sampled_from_proto(token) for token in message.prompt]) if message.prompt else (),
        drafts=read(DraftRound, message.drafts) if message.HasField("drafts") else None,
        origin=read(TokenOrigin, message.origin) if message.HasField("origin") else None,
    )


def timings_to_proto(timings: Timings) -> orchestrator_pb2.Timings:
    """Convert the timings of a request, the start and end times of its stages, to a message."""
    way = timings.prefill
    prefill = orchestrator_pb2.PrefillTrace(
        placement=None if way.placement is None else orchestrator_pb2.Placement(**asdict(way.placement)),
        width=None if way.width is None else orchestrator_pb2.WidthChoice(**asdict(way.width)),
        ranks=[_rank_timing_to_proto(rank) for rank in way.ranks],
        fetch=None if way.fetch is None else orchestrator_pb2.PrefixFetch(**vars(way.fetch)),
    )
    trace = timings.speculation
    speculation = None if trace is None else orchestrator_pb2.SpeculationTrace(**asdict(trace))
    return orchestrator_pb2.Timings(**vars(timings) | {"prefill": prefill, "speculation": speculation})


def timings_from_proto(message: orchestrator_pb2.Timings) -> Timings:
    """Convert a message to the timings of a request. Raises InvalidArgumentError if the token range of a rank ends
    before it starts."""
    prefill = PrefillTrace(
        placement=_placement_from_proto(message.prefill.placement) if message.prefill.HasField("placement") else None,
        width=_width_from_proto(message.prefill.width) if message.prefill.HasField("width") else None,
        ranks=tuple(rank_timing_from_proto(each) for each in message.prefill.ranks),
        fetch=read(PrefixFetch, message.prefill.fetch) if message.prefill.HasField("fetch") else None,
    )
    speculation = _speculation_from_proto(message.speculation) if message.HasField("speculation") else None
    return read(Timings, message, prefill=prefill, speculation=speculation)


def _speculation_from_proto(message: orchestrator_pb2.SpeculationTrace) -> SpeculationTrace:
    return SpeculationTrace(message.num_steps, tuple(read(DraftCounts, each) for each in message.sources))


def _rank_timing_to_proto(rank: RankTiming) -> prefill_pb2.RankTiming:
    layers = [prefill_pb2.TimeSpan(start_ns=layer.start_ns, end_ns=layer.end_ns) for layer in rank.layers]
    return prefill_pb2.RankTiming(**vars(rank) | {"tokens": range_to_proto(rank.tokens), "layers": layers})


def rank_timing_from_proto(message: prefill_pb2.RankTiming) -> RankTiming:
    """Convert a message to the timing of one prefill rank. Raises InvalidArgumentError if its token range ends before
    it starts."""
    layers = tuple([Interval(layer.start_ns, layer.end_ns) for layer in message.layers])
    return read(RankTiming, message, tokens=range_from_proto(message.tokens), layers=layers)


def _width_from_proto(message: orchestrator_pb2.WidthChoice) -> WidthChoice:
    return read(WidthChoice, message, options=tuple(read(WidthOption, each) for each in message.options))


def _placement_from_proto(message: orchestrator_pb2.Placement) -> Placement:
    chain = read(PlacementTerms, message.chain) if message.HasField("chain") else None
    local = read(PlacementTerms, message.local) if message.HasField("local") else None
    return Placement(message.reason, chain, local)


def requests_to_proto(requests: RequestList) -> orchestrator_pb2.RequestList:
    """Convert a list of an orchestrator's requests to a message."""
    return orchestrator_pb2.RequestList(
        now_ns=requests.now_ns,
        requests=[
            orchestrator_pb2.RequestStatus(
                **vars(each)
                | {
                    "usage": orchestrator_pb2.Usage(**vars(each.usage)),
                    "timings": timings_to_proto(each.timings),
                    "reasons": [finish_to_proto(reason) for reason in each.reasons],
                }
            )
            for each in requests.requests
        ],
    )


def requests_from_proto(message: orchestrator_pb2.RequestList) -> RequestList:
    """Convert a message to a list of requests. Raises InvalidArgumentError if the token range of a rank ends before it
    starts, and VersionMismatchError for an unknown finish reason."""
    return RequestList(message.now_ns, tuple(_request_from_proto(each) for each in message.requests))


def _request_from_proto(message: orchestrator_pb2.RequestStatus) -> RequestStatus:
    reasons = (finish_from_proto(each) for each in message.reasons)
    return read(
        RequestStatus,
        message,
        usage=read(Usage, message.usage),
        timings=timings_from_proto(message.timings),
        reasons=tuple(reason for reason in reasons if reason is not None),
    )


def model_from_proto(message: orchestrator_pb2.Model) -> ModelInfo:
    """Convert a message to the description of the served model and its limits."""
    return read(ModelInfo, message)

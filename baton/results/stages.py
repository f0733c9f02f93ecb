"""Stages of a request as time intervals. Used by metrics, traces, `baton trace` and the console. All functions are
pure.

Times are in unix nanoseconds, from the clocks of several machines, which may differ. If the end of a stage would be
before its start, the stage has a length of 0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from baton.results.prefill_trace import Interval
from baton.results.timings import Timings

Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Stage:
    """One stage of a request, with its name, time interval and attributes."""

    name: str
    """Name of the stage. For a whole request: queue, placement, prefill, transfer, insert or decode. For one prefill
    rank: prefill_rank or transfer_rank."""
    at: Interval
    rank: int | None = None
    """Index of the prefill rank to which the stage belongs. None for a stage of the whole request."""
    attributes: Attributes = field(default_factory=dict)


def stages_of(timings: Timings, num_output_tokens: int) -> Iterator[Stage]:
    """Yield all stages that a request has reached by `timings.finished_ns`. Stages of the whole request come first,
    in order, and then the stages of individual prefill ranks. `num_output_tokens` is the number of output tokens so
    far."""
    to_first = list(first_token_stages(timings)) or list(_stages_without_token(timings))
    for name, at in to_first:
        yield Stage(name, at)
    if timings.first_token_ns:
        decoding = _ordered(timings.first_token_ns, timings.finished_ns)
        yield Stage("decode", decoding, attributes=_decoding(timings, num_output_tokens))
    for each in timings.prefill.ranks:
        computed = {
            "baton.tokens": len(each.tokens),
            "baton.first_token": each.tokens.start,
            "baton.wait_s": each.wait_s,
            "baton.bytes_sent": each.num_bytes_sent,
        }
        yield Stage("prefill_rank", _ordered(each.start_ns, each.end_ns), each.rank, computed)
        pushed = {"baton.bytes_pushed": each.num_bytes_pushed, "baton.bytes_shared": each.num_bytes_shared}
        yield Stage("transfer_rank", _ordered(each.push_start_ns, each.push_end_ns), each.rank, pushed)


def first_token_stages(timings: Timings) -> Iterator[tuple[str, Interval]]:
    """Yield the stages of a request up to its first token, in order and without gaps. The first stage begins when the
    request is received, and each other stage begins at the end of the previous one.

        queue      ends when the request leaves the queue
        placement  ends when the request has a slot; earlier attempts are included
        prefill    ends when the last rank has computed its chunk
        transfer   ends when the last byte of KV has been pushed
        insert     ends when the first token has been sent

    If the generation group itself prefilled the request, there is no transfer and no insert, and prefill ends with the
    first token. Yields nothing if no first token was sent, or if it was sent by an attempt before the last one.
    """
    if not timings.first_token_ns or not 0 < timings.leased_ns <= timings.first_token_ns:
        return
    marks = [("queue", timings.admitted_ns), ("placement", timings.leased_ns)]
    if ranks := timings.prefill.ranks:
        computed_ns = max(rank.end_ns for rank in ranks)
        marks += [("prefill", computed_ns), ("transfer", max(rank.push_end_ns for rank in ranks))]
    marks.append(("insert" if ranks else "prefill", timings.first_token_ns))
    before_ns = timings.received_ns
    for stage, mark_ns in marks:
        at_ns = min(max(mark_ns, before_ns), timings.first_token_ns)
        yield stage, Interval(before_ns, at_ns)
        before_ns = at_ns


def _stages_without_token(timings: Timings) -> Iterator[tuple[str, Interval]]:
    """Yield the stages of a request whose last attempt made no first token. The last stage ends when the request ends,
    or at the first token that an earlier attempt made."""
    end_ns = timings.first_token_ns or timings.finished_ns
    before_ns = timings.received_ns
    for stage, mark_ns in (("queue", timings.admitted_ns), ("placement", timings.leased_ns), ("prefill", 0)):
        at_ns = min(max(mark_ns, before_ns), end_ns) if mark_ns else end_ns
        yield stage, _ordered(before_ns, at_ns)
        before_ns = at_ns
        if not mark_ns or at_ns >= end_ns:
            return


def _decoding(timings: Timings, num_output_tokens: int) -> Attributes:
    """Return the attributes of the decode stage: output tokens, residency policy, and counts of steps and drafts."""
    found: dict[str, str | int | float] = {"gen_ai.usage.output_tokens": num_output_tokens}
    if timings.residency:
        found["baton.residency"] = timings.residency
    if (speculation := timings.speculation) is not None:
        found["baton.steps"] = speculation.num_steps
        found["baton.drafted"] = sum(each.num_drafted for each in speculation.sources)
        found["baton.accepted"] = sum(each.num_accepted for each in speculation.sources)
    return found


def _ordered(start_ns: int, end_ns: int) -> Interval:
    return Interval(start_ns, max(start_ns, end_ns))

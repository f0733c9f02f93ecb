"""Computes the rates of a cluster's work between two samples of its state. The functions have no side effects."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.calls.cluster_state import ClusterState
from deploy.top.sampling import Snapshot, buckets, quantile

_FIRST_TOKEN = "baton_time_to_first_token_seconds"
_TOKEN = "baton_time_per_output_token_seconds"


@dataclass(frozen=True)
class Rates:
    """Rates of a cluster between two samples, per second. Tokens and latencies include only requests that ended between
    the samples."""

    seconds: float
    requests: float
    refused: float
    prompt_tokens: float
    output_tokens: float
    cached_share: float | None
    """Fraction of the prompt tokens whose KV was in the prefix cache. None if there were no prompt tokens."""
    first_token_s: tuple[float | None, float | None]
    """Median and 95th percentile of the time to first token, in seconds. Both are None if no requests ended."""
    token_s: tuple[float | None, float | None]
    """Median and 95th percentile of the time between output tokens, in seconds. Both are None if no requests ended."""
    steps: Mapping[str, float]
    """Steps per second of each generation group, by group name. A group whose counter was reset between the samples is
    left out."""
    jobs: Mapping[str, float]
    """Jobs per second that the last rank of each prefill group completed, by group name. A job is one attempt at
    prefilling one request. A group whose counter was reset between the samples is left out."""
    pushed_bytes: float
    """Bytes of KV per second that prefill chains sent to generation groups."""
    read_bytes: Mapping[str, float]
    """Bytes of KV per second that slots read from prefix stores, by the store's tier (memory or disk)."""


def between(before: Snapshot, after: Snapshot) -> Rates | None:
    """Return the rates between two samples. Return None if both samples have the same time, or if the orchestrator was
    restarted between them, because a restart sets its counters to 0."""
    seconds = after.at_s - before.at_s
    name = "baton_requests_total"
    if seconds <= 0 or after.value(name) < before.value(name):
        return None

    def rate(name: str, **labels: str) -> float:
        return max(after.value(name, **labels) - before.value(name, **labels), 0.0) / seconds

    def quantiles(name: str) -> tuple[float | None, float | None]:
        observed = buckets(before.metrics, after.metrics, name)
        return quantile(0.5, observed), quantile(0.95, observed)

    prompt_tokens = rate("baton_tokens_total", type="input")
    return Rates(
        seconds=seconds,
        requests=rate(name),
        refused=rate("baton_requests_refused_total"),
        prompt_tokens=prompt_tokens,
        output_tokens=rate("baton_tokens_total", type="output"),
        cached_share=rate("baton_cached_tokens_total") / prompt_tokens if prompt_tokens else None,
        first_token_s=quantiles(_FIRST_TOKEN),
        token_s=quantiles(_TOKEN),
        steps=_grown(_num_steps(before.state), _num_steps(after.state), seconds),
        jobs=_grown(_num_jobs(before.state), _num_jobs(after.state), seconds),
        pushed_bytes=rate("baton_kv_pushed_bytes_total"),
        read_bytes={tier: rate("baton_prefix_read_bytes_total", tier=tier) for tier in ("memory", "disk")},
    )


def _grown(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Return the growth of each count per second, without counts that are new or were reset."""
    return {
        name: (count - before[name]) / seconds
        for name, count in after.items()
        if name in before and count >= before[name]
    }


def _num_steps(state: ClusterState) -> dict[str, int]:
    return {each.name: each.generation.num_steps for each in state.groups if each.generation is not None}


def _num_jobs(state: ClusterState) -> dict[str, int]:
    return {each.name: each.ranks[max(each.ranks)].num_jobs_done for each in state.groups if each.ranks}

"""Latency targets that a good request meets, parsed from options such as `ttft=500ms`. Does no I/O."""

import re
from collections.abc import Mapping, Sequence

from baton.errors import InvalidArgumentError

METRICS = ("ttft", "tpot", "e2el")
"""Metrics that can have a target: time to first token, time per output token, end-to-end latency."""
_UNITS_S = {"ms": 1e-3, "s": 1.0}


def parse_targets(texts: Sequence[str]) -> Mapping[str, float]:
    """Parse latency targets and return them in seconds, by metric. Each text holds one target, or several separated by
    commas.

    Raises InvalidArgumentError for an unknown metric, a time without a unit, or a metric that occurs twice.
    """
    targets: dict[str, float] = {}
    for text in (part for each in texts for part in each.split(",")):
        metric, _, value = (part.strip() for part in text.partition("="))
        if metric not in METRICS:
            raise InvalidArgumentError(
                f"--target: {text!r} does not name one of {', '.join(METRICS)}: write for example ttft=500ms"
            )
        if metric in targets:
            raise InvalidArgumentError(f"--target: {metric} is named twice: leave one out")
        targets[metric] = _seconds(metric, value)
    return targets


def target_words(targets: Mapping[str, float]) -> str:
    """Return the targets as text for people, for example in a table's heading."""
    return ", ".join(f"{metric} <= {seconds * 1e3:g} ms" for metric, seconds in targets.items())


def _seconds(metric: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)", text)
    if found is None or not float(found[1]):
        raise InvalidArgumentError(
            f"--target: {metric} = {text!r} is not a time above 0: write for example {metric}=50ms"
        )
    return float(found[1]) * _UNITS_S[found[2]]

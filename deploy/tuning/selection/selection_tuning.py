"""Searches for the smallest selection of keys whose cost, an increase of perplexity, is allowed. Used by `baton
prepare`. To measure the cost of a candidate, the model reads a text while it attends only to the keys that the
candidate selects.

A selection has two bounds. `alpha` is the maximum distance of a selected key's score from the best score. `most_share`
(the cap) is the maximum fraction of a sequence's keys that are selected by score. Tighter bounds increase the
perplexity and save bytes.

First, bisection finds the tightest cap whose cost is allowed, without a bound on scores. Then the smallest `alpha`
whose cost is allowed is searched, for this cap and for the next looser cap. The best of the selections whose cost is
allowed is the one that reads the fewest bytes.

The cap never limits a sequence to fewer than a fixed number of keys (`free_keys`). A cap that allows no more keys than
this number at the measured length has no effect there, but would affect longer sequences. Therefore such caps are not
tried.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.errors import ConfigError
from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import Basis

ALPHAS = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, math.inf)
CAPS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.4)


@dataclass(frozen=True)
class Measured:
    """Selection of keys, with its cost in perplexity and the bytes that it reads. Both are compared with full attention
    on the same text."""

    basis: Basis
    selection: Selection
    cost: float
    """Relative increase of perplexity compared with full attention."""
    cost_error: float
    """Standard error of `cost` over passages; NaN for one passage."""
    picked_share: float
    """Mean fraction of a sequence's keys that were attended to. Only layers in which the policy selects keys count."""
    read_share: float
    """Bytes read, as a fraction of the KV bytes that full attention reads. The bytes include KV for attention, and
    partial keys (keys projected to fewer columns, from which scores are estimated)."""

    @property
    def likely_cost(self) -> float:
        """Cost plus one standard error, both as a relative increase of perplexity."""
        return self.cost + (0.0 if math.isnan(self.cost_error) else self.cost_error)


Measure = Callable[[Basis, Selection], Measured]


def cheapest(bases: Sequence[Basis], fixed: Selection, context: int, measure: Measure) -> list[Basis]:
    """Return a list with the best basis for each number of columns. A basis projects queries and keys to a few columns,
    from which scores are estimated. The best basis is the one that increases perplexity least. The increase is measured
    with the smallest cap (`most_share`, the maximum fraction of keys selected by score) that `tune` tries, and without
    a bound on scores (`alpha`)."""
    tightest = replace(fixed, alpha=math.inf, most_share=_caps(fixed, context)[0])
    rivals = [[basis for basis in bases if basis.num_columns == num] for num in sorted({b.num_columns for b in bases})]
    return [
        group[0] if len(group) == 1 else min(group, key=lambda basis: measure(basis, tightest).cost) for group in rivals
    ]


def tune(bases: Sequence[Basis], fixed: Selection, context: int, most_cost: float, measure: Measure) -> list[Measured]:
    """Find the selections that stay within a cost. Return them, ordered so that the one that reads the fewest bytes is
    first.

    For each basis (a projection of queries and keys to a few columns), up to three selections are returned. The first
    has the tightest cap (`most_share`, the maximum fraction of keys selected by score), without a bound on scores. The
    others have the smallest `alpha` (bound on scores) for this cap and for the next looser cap. A selection's cost plus
    one standard error must be at most `most_cost`, which is a relative increase of perplexity. `fixed` has the number
    of keys that are always selected, and the number of keys that may be selected by score regardless of the cap.
    `context` is the number of tokens of the shortest measured sequence. Raises ConfigError if no selection stays within
    the cost.
    """
    tries: list[Measured] = []
    caps = _caps(fixed, context)

    def attempt(basis: Basis, selection: Selection) -> Measured:
        tries.append(measure(basis, selection))
        return tries[-1]

    found = [each for basis in bases for each in _tightest(basis, fixed, caps, most_cost, attempt)]
    if not found:
        least = min(each.likely_cost for each in tries)
        raise ConfigError(
            f"--cost {most_cost:g} is less than the {least:.4f} that even the most generous choice may cost here:"
            " allow more, use larger --ratios, or more --rows and --steps to measure it more exactly"
        )
    return sorted(found, key=lambda each: each.read_share)


def _caps(fixed: Selection, context: int) -> list[float]:
    """Return the caps that have an effect on sequences of `context` tokens, the tightest first. If no cap has an
    effect, return only the loosest."""
    return [cap for cap in CAPS if math.floor(cap * context) > fixed.free_keys] or list(CAPS[-1:])


def _tightest(
    basis: Basis, fixed: Selection, caps: Sequence[float], most_cost: float, measure: Measure
) -> Iterator[Measured]:
    def find(selections: Sequence[Selection]) -> Measured | None:
        """Return the tightest selection that stays within the cost; None if there is none. `selections` are ordered
        from tight to loose."""
        found: Measured | None = None
        low, high = 0, len(selections)  # before `low` all cost too much; `high` and later do not
        while low < high:
            middle = (low + high) // 2
            measured = measure(basis, selections[middle])
            if measured.likely_cost <= most_cost:
                found, high = measured, middle
            else:
                low = middle + 1
        return found

    capped = find([replace(fixed, alpha=math.inf, most_share=cap) for cap in caps])
    if capped is None:
        return
    yield capped
    first = caps.index(capped.selection.most_share)
    for cap in caps[first : first + 2]:
        by_alpha = find([replace(fixed, alpha=alpha, most_share=cap) for alpha in ALPHAS[:-1]])
        if by_alpha is not None:
            yield by_alpha

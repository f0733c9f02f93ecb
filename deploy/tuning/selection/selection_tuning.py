"""Finds how few keys are enough: the search behind `baton prepare`, by what reading text through the policy costs.

A selection has two bounds: alpha, how close to the best score a key must come, and most_share, the cap on how many keys
a row may choose by score. The tighter they are, the more perplexity they cost and the more bytes they save. The
tightest cap that keeps within the allowed cost without alpha is found by bisection; for it, and for the next looser
one, the least alpha is. Of the selections that keep within the cost, the one that reads least is best. A cap below the
number of keys that any row may choose has no effect on rows of the measured length, and is not tried: it would affect
longer rows.
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
    """A way to choose keys, with the cost and savings of reading some text by it, compared with full attention on the
    same text."""

    basis: Basis
    selection: Selection
    cost: float
    """Relative rise of perplexity above full attention's."""
    cost_error: float
    """Standard error of `cost` over passages; NaN for one passage."""
    picked_share: float
    """Mean fraction of a row's keys that was attended to, in layers that choose."""
    read_share: float
    """Bytes of KV and partial keys that attention and choosing read, as a fraction of full attention's KV."""

    @property
    def likely_cost(self) -> float:
        """The cost, raised by one standard error."""
        return self.cost + (0.0 if math.isnan(self.cost_error) else self.cost_error)


Measure = Callable[[Basis, Selection], Measured]


def cheapest(bases: Sequence[Basis], fixed: Selection, context: int, measure: Measure) -> list[Basis]:
    """Keep one basis of each number of columns: the one with the lowest cost under the tightest cap, without alpha."""
    tightest = replace(fixed, alpha=math.inf, most_share=_caps(fixed, context)[0])
    rivals = [[basis for basis in bases if basis.num_columns == num] for num in sorted({b.num_columns for b in bases})]
    return [
        group[0] if len(group) == 1 else min(group, key=lambda basis: measure(basis, tightest).cost) for group in rivals
    ]


def tune(bases: Sequence[Basis], fixed: Selection, context: int, most_cost: float, measure: Measure) -> list[Measured]:
    """Find, for each basis and cap, the least alpha whose cost, even if it were a standard error worse, is at most
    `most_cost`, a fraction of perplexity. `fixed` has the numbers of keys that are always and freely chosen. Return the
    selections, the one that reads least first. `context` is the least number of tokens of the measured rows. Raises
    ConfigError when nothing keeps within the cost."""
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
    """Return the caps that limit rows of `context` tokens, the tightest first; if none does, the loosest cap."""
    return [cap for cap in CAPS if math.floor(cap * context) > fixed.free_keys] or list(CAPS[-1:])


def _tightest(
    basis: Basis, fixed: Selection, caps: Sequence[float], most_cost: float, measure: Measure
) -> Iterator[Measured]:
    def find(selections: Sequence[Selection]) -> Measured | None:
        """Return the tightest of the selections, ordered from tight to loose, that keeps within the cost."""
        found: Measured | None = None
        low, high = 0, len(selections)  # below `low` they cost too much, from `high` on they do not
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

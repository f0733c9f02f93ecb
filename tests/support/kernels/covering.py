"""Sets of test cases that cover all pairs of levels of any two factors (pairwise testing). They test interactions of
two factors with far fewer cases than all combinations."""

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Levels = Mapping[str, Sequence[Hashable]]
"""Levels of each factor, by the factor's name."""
Case = dict[str, Hashable]
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]

_TRIES = 4
"""Number of candidate cases, of which the one that covers the most new pairs is chosen."""


def covering(levels: Levels, seed: int = 0) -> list[Case]:
    """Return cases that cover all pairs of levels, chosen greedily. The same seed gives the same cases."""
    choice = random.Random(seed)
    left = dict.fromkeys(pairs(levels))
    cases = []
    while left:
        case = max((_made(levels, left, choice) for _ in range(_TRIES)), key=lambda each: len(left.keys() & _met(each)))
        cases.append({name: case[name] for name in levels})
        for pair in _met(case):
            left.pop(pair, None)
    return cases


def pairs(levels: Levels) -> list[Pair]:
    """Return all pairs of levels of two different factors."""
    names = sorted(levels)
    return [((a, x), (b, y)) for a, b in combinations(names, 2) for x in levels[a] for y in levels[b]]


def _made(levels: Levels, left: dict[Pair, None], choice: random.Random) -> Case:
    """Return a case that contains a random pair of the uncovered pairs `left`. Its other levels are chosen to cover the
    most of the remaining pairs."""
    case: Case = dict(choice.choice(list(left)))
    names = [name for name in levels if name not in case]
    choice.shuffle(names)
    for name in names:
        scored = [
            (sum(_pair(name, x, *other) in left for other in case.items()), choice.random()) for x in levels[name]
        ]
        case[name] = levels[name][scored.index(max(scored))]
    return case


def _met(case: Case) -> set[Pair]:
    return {_pair(a, x, b, y) for (a, x), (b, y) in combinations(case.items(), 2)}


def _pair(a: str, x: Hashable, b: str, y: Hashable) -> Pair:
    return ((a, x), (b, y)) if a < b else ((b, y), (a, x))

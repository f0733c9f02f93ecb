"""Cases in which every two levels of any two factors meet: far fewer than all combinations, and what two factors do to
each other is tried.
"""

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Levels = Mapping[str, Sequence[Hashable]]
"""The levels of each factor, by its name."""
Case = dict[str, Hashable]
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]

_TRIES = 4
"""Cases that are made before the one that covers most is taken."""


def covering(levels: Levels, seed: int = 0) -> list[Case]:
    """Return cases that cover all pairs of levels, greedily: the same ones for the same seed."""
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
    """Return all pairs of levels of two factors."""
    names = sorted(levels)
    return [((a, x), (b, y)) for a, b in combinations(names, 2) for x in levels[a] for y in levels[b]]


def _made(levels: Levels, left: dict[Pair, None], choice: random.Random) -> Case:
    """Return a case with one pair of those left, filled up by the levels that cover most of the others."""
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

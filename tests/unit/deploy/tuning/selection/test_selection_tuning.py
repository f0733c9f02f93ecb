"""The search finds what brute force finds, and asks far less."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.errors import ConfigError
from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import Basis, BasisKind
from deploy.tuning.selection.selection_tuning import ALPHAS, CAPS, Measured, cheapest, tune

FIXED = Selection(alpha=math.inf, most_share=1.0, num_first=3, num_last=7)
CONTEXT = 4096


def basis(num_columns: int) -> Basis:
    return Basis(BasisKind.SKEW, torch.zeros(3, 1, 16, num_columns), torch.zeros(3, 1, 16, num_columns))


class Model:
    """Cost falls, and bytes grow, with columns, alpha and cap, as they do in truth."""

    def __init__(self, error: float = 0.0) -> None:
        self.tried: list[tuple[int, float, float]] = []
        self._error = error

    def measure(self, basis: Basis, selection: Selection) -> Measured:
        self.tried.append((basis.num_columns, selection.alpha, selection.most_share))
        assert (selection.num_first, selection.num_last) == (3, 7)
        missed = math.exp(-selection.alpha) + math.exp(-20 * selection.most_share)
        picked = min(selection.most_share, 0.03 * selection.alpha)
        return Measured(
            basis,
            selection,
            cost=missed * 8 / basis.num_columns,
            cost_error=self._error,
            picked_share=picked,
            read_share=0.1 + basis.num_columns / 32 + picked,
        )


def brute(bases: list[Basis], most_cost: float, allowed: Callable[[float, float], bool]) -> float:
    """The least that can be read within the cost."""
    tries = itertools.product(bases, ALPHAS, CAPS)
    measured = [Model().measure(each, Selection(alpha, cap, 3, 7)) for each, alpha, cap in tries if allowed(alpha, cap)]
    return min(each.read_share for each in measured if each.cost <= most_cost)


def test_of_bases_as_wide_the_one_that_costs_least_is_tuned() -> None:
    skew, plain, alone = basis(8), replace(basis(8), kind=BasisKind.COLUMNS), basis(4)
    asked: list[tuple[BasisKind, float, float]] = []

    def measure(basis: Basis, selection: Selection) -> Measured:
        asked.append((basis.kind, selection.alpha, selection.most_share))
        cost = 0.01 if basis.kind is BasisKind.COLUMNS else 0.02
        return Measured(basis, selection, cost, 0.5, 0.1, 0.3)

    fixed = replace(FIXED, free_keys=256)
    assert cheapest([skew, alone, plain], fixed, CONTEXT, measure) == [alone, plain]
    assert asked == [(BasisKind.SKEW, math.inf, 0.07), (BasisKind.COLUMNS, math.inf, 0.07)]


@pytest.mark.parametrize("most_cost", [0.02, 0.1, 0.3, 1.0])
def test_the_tightest_cap_and_the_least_alpha_under_it(most_cost: float) -> None:
    model, bases = Model(), [basis(4), basis(8)]
    found = tune(bases, FIXED, CONTEXT, most_cost, model.measure)
    assert all(each.cost <= most_cost for each in found)
    shares = [each.read_share for each in found]
    assert shares == sorted(shares)
    caps = {each.selection.most_share for each in found}
    assert shares[0] == brute(bases, most_cost, lambda _, cap: cap in caps)
    assert len(model.tried) <= 2 * (4 + 2 * 4), "bisections"


@pytest.mark.parametrize(("free_keys", "caps"), [(1, CAPS), (40, CAPS[1:]), (61, CAPS[2:]), (2000, CAPS[-1:])])
def test_a_cap_that_the_rows_at_hand_would_not_feel_is_not_tried(free_keys: int, caps: tuple[float, ...]) -> None:
    model = Model()
    tune([basis(8)], replace(FIXED, free_keys=free_keys), 2000, 10.0, model.measure)  # so that the tightest will do
    assert min(cap for _, _, cap in model.tried) == caps[0]


def test_what_is_sure_to_keep_within_is_taken_not_what_may() -> None:
    sure, unsure = (tune([basis(8)], FIXED, CONTEXT, 0.1, Model(error).measure)[0] for error in (0.0, 0.05))
    assert unsure.cost <= 0.05 < sure.cost <= 0.1


def test_one_passage_has_no_error_and_is_taken_as_it_is() -> None:
    assert tune([basis(8)], FIXED, CONTEXT, 0.1, Model(math.nan).measure)[0].cost <= 0.1


def test_a_basis_that_is_too_narrow_is_left_out() -> None:
    found = tune([basis(1), basis(8)], FIXED, CONTEXT, 0.001, Model().measure)
    assert {each.basis.num_columns for each in found} == {8}


def test_a_cost_that_nothing_keeps_within_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--cost 0.0001 is less than the 0.0003 that even the most generous"):
        tune([basis(8)], FIXED, CONTEXT, 0.0001, Model().measure)

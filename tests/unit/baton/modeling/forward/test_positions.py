"""The two ways by which positions enter: each does its part, and nothing in the other's place."""

import pytest
import torch

from baton.modeling.forward.positions import LearnedTable
from baton.modeling.forward.rope import RotaryTable, apply_rotary
from tests.support.models.tiny_models import random_decoder

CONFIG = random_decoder(num_heads=2).config


def test_learned_rows_are_added_to_hidden_states_in_place() -> None:
    rows_PD, hidden_TD = torch.randn(8, 4), torch.ones(3, 4)
    LearnedTable(rows_PD).lookup(torch.tensor([5, 0, 7])).enter(hidden_TD)
    assert torch.equal(hidden_TD, 1 + rows_PD[[5, 0, 7]])


def test_learned_positions_turn_nothing() -> None:
    x_TNH = torch.randn(1, 2, 4)
    assert LearnedTable(torch.randn(8, 4)).lookup(torch.tensor([5])).turn(x_TNH, 0) is x_TNH


def test_a_position_beyond_the_learned_ones_is_an_error() -> None:
    with pytest.raises(IndexError):
        LearnedTable(torch.randn(8, 4)).lookup(torch.tensor([8]))


def test_rotary_positions_turn_heads_and_leave_hidden_states() -> None:
    rotation = RotaryTable(CONFIG, torch.device("cpu"), torch.float32).lookup(torch.tensor([3, 9]))
    x_TNH, hidden_TD = torch.randn(2, 2, 16), torch.ones(2, 32)
    assert torch.equal(rotation.turn(x_TNH, 0), apply_rotary(x_TNH, rotation))
    assert not torch.equal(rotation.turn(x_TNH, 0), x_TNH)
    rotation.enter(hidden_TD)
    assert torch.equal(hidden_TD, torch.ones(2, 32))

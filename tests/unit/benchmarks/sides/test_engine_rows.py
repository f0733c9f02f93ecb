"""Rows of a benchmark's engine: all of them run at their own lengths, their bytes are the formula's, limits hold."""

from pathlib import Path

import pytest

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import weight_bytes
from benchmarks.decode import BARS, GRID, Cell
from benchmarks.residency import compare, link_bytes
from benchmarks.sides.engine_rows import EngineRows, num_rows_that_fit, row_lengths
from generate_workers.config import EngineConfig, ResidencyName
from tests.support.models.letter_models import write_letter_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letter_model(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_decoder(folder)


def test_lengths_lie_evenly_around_the_context() -> None:
    assert row_lengths(1, 192) == [192]
    lengths = row_lengths(16, 1000)
    assert len(set(lengths)) == 16 and sum(lengths) == 16_000
    assert (min(lengths), max(lengths)) == (906, 1094)


def test_half_of_the_steps_come_before_the_context_is_reached() -> None:
    lengths = Cell.parse("4x512").lengths(num_rounds=10)
    assert sum(lengths) / 4 == 512 - 25


def test_every_promised_cell_is_in_the_grid() -> None:
    cells = [Cell.parse(text) for text in GRID.split(",")]
    assert {(cell.batch, cell.context) for cell in cells} == set(BARS)


@pytest.mark.parametrize("policy", ["device", "host"])
def test_steps_run_all_rows_and_read_what_they_hold(decoder: Decoder, folder: Path, policy: ResidencyName) -> None:
    config = EngineConfig(num_slots=3, max_slot_tokens=32, residency=policy)
    with EngineRows.running(decoder, folder, [4, 7, 9], 6, config) as rows:
        assert rows.step_ms(3) > 0
        assert rows.last.num_decode_rows == 3
        assert rows.last.num_kv_bytes == decoder.layout.token_bytes * (4 + 7 + 9 + 3 * 4)
        assert rows.last.num_weight_bytes > 0


def test_both_policies_side_by_side_move_the_formula_s_bytes(decoder: Decoder, folder: Path) -> None:
    pairs, moved, expected = compare(decoder, folder, [4, 7], num_pairs=2)
    assert len(pairs.ours) == len(pairs.theirs) == 2
    assert moved == expected > 0
    assert expected != link_bytes(decoder.layout.token_bytes, [4, 7])


def test_a_limited_device_says_why_no_more_rows_fit(decoder: Decoder) -> None:
    room = weight_bytes(decoder.weights) + (300 << 10)
    at_most = EngineConfig(num_slots=8, max_slot_tokens=64, device_memory_bytes=room)
    number, reason = num_rows_that_fit(decoder, 60, at_most)
    assert 0 < number < 8 and "device_memory_bytes" in reason
    assert num_rows_that_fit(decoder, 60, EngineConfig(num_slots=8, max_slot_tokens=64)) == (8, "")

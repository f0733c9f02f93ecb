"""Rows of the benchmark of sparse steps: both sides read the same text, and one of them less of it."""

import pytest

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from benchmarks.sparse import FittedHere, compare, contexts_of
from deploy.tuning.selection.passages import prefill
from tests.support.models.letter_models import write_letter_model

TOKEN_IDS = tuple((3 * at * at + at) % 95 for at in range(300))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_letter_model(tmp_path_factory.mktemp("letters")))


def test_rows_have_read_as_much_as_they_should(decoder: Decoder) -> None:
    kv = prefill(decoder, TOKEN_IDS[:40])
    rows = contexts_of(TOKEN_IDS, kv, [30, 40], num_steps=5)
    assert [row.passage.num_context for row in rows] == [30, 40]
    assert [row.passage.token_ids for row in rows] == [TOKEN_IDS[:36], TOKEN_IDS[:46]]
    assert [row.passage.num_steps for row in rows] == [5, 5]


def test_the_sparse_side_reads_less_and_the_other_all(decoder: Decoder) -> None:
    num_pairs, lengths = 2, [200, 230]
    num_steps = (num_pairs + 1) * 3
    rows = contexts_of(TOKEN_IDS, prefill(decoder, TOKEN_IDS[:230]), lengths, num_steps)
    steps, kv_bytes = compare(decoder, rows, FittedHere(decoder, text=TOKEN_IDS), num_pairs)
    assert len(steps.ours) == len(steps.theirs) == num_pairs and min(steps.ours) > 0
    [ours], [theirs] = kv_bytes.ours, kv_bytes.theirs
    assert theirs == decoder.layout.token_bytes * sum(length + num_steps for length in lengths)
    whole = theirs * 2 / decoder.layout.num_layers
    assert whole < ours <= whole + (theirs - whole) * (0.2 + 20 / 200)  # the cap; first and last keys besides

"""`baton prepare` on the sample model: a file that workers can load, what it measured, and what it refuses."""

import math
from pathlib import Path

import pytest
import torch

from baton.errors import InvalidArgumentError, ModelError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import BasisKind
from baton.modeling.sparse.selection_file import load_prepared
from deploy.cli import build_parser
from deploy.tuning.selection import fitting as prepare_run
from deploy.tuning.selection.fitting import require_fit
from deploy.tuning.selection.prepare import KINDS, find_wanted
from deploy.tuning.selection.wanted import Wanted
from tests.conftest import MODEL_CACHE
from tests.support.folders import DATA
from tests.support.models.tiny_models import random_decoder
from tests.support.wire.commands import Baton

NOVEL = DATA / "persuasion.txt.gz"
SMALL = f"--cache {MODEL_CACHE} --threads 1 --rows 4 --context 128 --steps 4"


def wanted(arguments: str) -> Wanted:
    return find_wanted(build_parser().parse_args(["prepare", "smollm2-135m", "--text", "novel", *arguments.split()]))


@pytest.fixture(autouse=True)
def same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch, "set_num_threads", lambda num_threads: None)


def test_the_kinds_that_help_offers_are_all() -> None:
    assert tuple(kind.value for kind in BasisKind) == KINDS


def test_a_selection_by_hand_is_measured_and_kept(smollm2: Path, tmp_path: Path, baton: Baton) -> None:
    path = tmp_path / "selection.safetensors"
    tried = "--kinds columns,skew --ratios 0.3 --lookahead 1"
    by_hand = "--alpha 6 --most-share 0.4 --first 2 --last 8 --free-keys 9"
    run = baton.run(f"prepare {smollm2} --text {NOVEL} {SMALL} {tried} {by_hand} --output {path}")
    assert run.status == 0
    prepared = load_prepared(path, load_decoder(smollm2, dtype="bfloat16"))
    assert prepared.selection == Selection(alpha=6.0, most_share=0.4, num_first=2, num_last=8, free_keys=9)
    assert prepared.lookahead == 1 and prepared.basis.num_columns == 19
    assert prepared.picked_share is not None and 0.1 < prepared.picked_share < 0.6
    assert prepared.captured_mass is not None and prepared.picked_share < prepared.captured_mass < 1
    assert prepared.perplexity_cost is not None and -0.5 < prepared.perplexity_cost < 2
    lines = [line.split() for line in run.out.splitlines()]
    rows = [line for line in lines if line[:1] in (["columns"], ["skew"]) and len(line) <= 5]
    masses = {line[0]: [float(each) for each in line[2:4]] for line in rows}
    best = max(masses, key=lambda name: masses[name][1])
    assert prepared.basis.kind.value == best, "by predicted queries, for that is how it will choose"
    assert all(0.5 < mass < 1 for row in masses.values() for mass in row)
    assert f"written to {path}" in run.out.replace("\n", "")
    paths = str(path), smollm2.name
    assert max(len(line) for line in run.out.splitlines() if not any(each in line for each in paths)) <= 80


def test_a_search_keeps_what_it_says(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baton: Baton
) -> None:
    monkeypatch.setattr(prepare_run, "prepared_path", lambda fingerprint, lookahead: tmp_path / fingerprint)
    tried = "--kinds columns --ratios 0.3 --cost 3 --free-keys 1"
    run = baton.run(f"prepare {smollm2} --text {NOVEL} {SMALL} {tried}")
    assert run.status == 0
    decoder = load_decoder(smollm2, dtype="bfloat16")
    prepared = load_prepared(tmp_path / decoder.layout.model_fingerprint, decoder)
    assert prepared.perplexity_cost is not None and prepared.perplexity_cost <= 3
    assert "columns 19, alpha inf, most 5%: reads" in run.err, "each attempt is told"
    lines = run.out.splitlines()
    first = lines[lines.index("") + 3].split()
    assert first[:3] == ["columns", "19", f"{prepared.selection.alpha:g}"]


def test_defaults_ask_for_a_search_over_everything() -> None:
    assert wanted("") == Wanted(
        kinds=KINDS,
        ratios=(0.2, 0.3),
        reach=0,
        lookahead=0,
        context=4096,
        num_rows=7,
        num_steps=128,
        most_cost=0.02,
        by_hand=None,
        num_first=4,
        num_last=16,
        free_keys=256,
    )
    assert wanted("--alpha inf").by_hand == (math.inf, 0.2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--kinds columns,magic", "--kinds: 'magic' is unknown: use some of columns, columns_q, skew"),
        ("--ratios 0.3,1.5", "--ratios: 1.5 is out of range: use a part of 1"),
        ("--ratios none", "--ratios = 'none' is out of range: use a number above 0"),
        ("--reach 0", "--reach: '0' is out of range"),
        ("--most-share 0.1", "--most-share bounds what --alpha chooses: give both, or neither"),
        ("--alpha 5 --most-share 2", "--most-share: 2 is out of range"),
        ("--alpha -1", "--alpha = '-1' is out of range"),
        ("--cost 0", "--cost = '0' is out of range"),
        ("--rows 2", "--rows 2 leaves nothing to judge by: use at least 3"),
        ("--first -1", "--first -1 is out of range: use 0 or more"),
        ("--last 0", "--last 0 leaves out the token itself: use 1 or more"),
        ("--free-keys 0", "--free-keys 0 leaves no key to choose: use 1 or more"),
        ("--context 4kk", "--context: '4kk'"),
    ],
)
def test_refusals_name_option_and_remedy(baton: Baton, arguments: str, text: str) -> None:
    assert text in baton.refusal(f"prepare smollm2-135m --text novel {arguments}")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--context 500 --steps 12", "--context 500 and --steps 12 are beyond the 512 tokens that the model takes"),
        ("--context 63", "--context 63 is too short to fit to: use at least 64"),
        ("--context 256 --reach 255", "--reach 255 is out of range: use at least the 256 tokens that bases"),
        ("--context 256 --reach 513", "and at most the 512 that the model takes"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_it_runs(arguments: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        require_fit(random_decoder(num_layers=3), wanted(arguments))


def test_a_model_without_a_layer_to_choose_in_is_refused() -> None:
    with pytest.raises(ModelError, match="the model has 2 layers, and the first 2 attend to all keys"):
        require_fit(random_decoder(num_layers=2), wanted("--context 128"))


def test_a_text_that_is_too_short_is_refused(smollm2: Path, tmp_path: Path, baton: Baton) -> None:
    (tmp_path / "text").write_text("It is a truth universally acknowledged.\n" * 20)
    run = baton.run(f"prepare smollm2-135m --text {tmp_path / 'text'} {SMALL}")
    assert run.status == 2 and "a row's part has" in run.err

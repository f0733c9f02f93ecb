"""`baton evaluate`: a tiny model reads a text through real policies; refusals are one line, before anything is read."""

import argparse
import gzip
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.sparse.bases import Basis, BasisKind
from baton.modeling.sparse.selection_file import PreparedSelection, save_prepared
from baton.types import TokenRange
from baton_lab.quality.evaluate import find_settings
from baton_lab.quality.needles import NeedleTexts
from baton_lab.quality.reading import Material, num_found
from deploy.cli import build_parser
from deploy.tuning.selection.passages import Context, Passage
from deploy.tuning.selection.texts import Texts
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from tests.support.engines.slot_tables import LAYOUT
from tests.support.models.letter_models import write_letter_model
from tests.support.models.tiny_tokenizer import ids_of, letter_tokenizer, text_of
from tests.support.wire.commands import Baton

pytestmark = pytest.mark.integration

NUM_ROWS, NUM_STEPS, CONTEXT = 2, 10, 60
SMALL = f"--rows {NUM_ROWS} --steps {NUM_STEPS} --context {CONTEXT} --dtype float32 --threads 1"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a text of 2,000 letters, and what `baton prepare` would have written."""
    made = write_letter_model(tmp_path_factory.mktemp("letters"))
    rng = random.Random(3)
    (made / "text.txt").write_text("\n".join("".join(rng.choices("etaoin shrdlu", k=79)) for _ in range(25)))
    layout = load_decoder(made, dtype="float32").layout
    whole_LGHH = torch.eye(layout.head_dim).repeat(layout.num_layers, layout.num_kv_heads, 1, 1)
    basis = Basis(BasisKind.COLUMNS, whole_LGHH, whole_LGHH)
    selection = Selection(alpha=5.0, most_share=0.25, num_first=2, num_last=4)
    prepared = PreparedSelection(basis, selection, 0, layout.model_fingerprint, "text", 1.0, 1.0)
    save_prepared(prepared, made / "whole.safetensors")
    return made


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "80")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def evaluated(baton: Baton, folder: Path, options: str) -> dict[str, Any]:
    run = baton.run(f"evaluate {folder} --text {folder / 'text.txt'} {SMALL} {options} --json")
    assert run.status == 0, run
    found: dict[str, Any] = json.loads(run.out)
    return found


def settings(options: str) -> list[str]:
    args: argparse.Namespace = build_parser().parse_args(["evaluate", "--text", "t.txt", *options.split()])
    return [str(setting) for setting in find_settings(args)]


def test_exact_policies_cost_nothing_and_read_all(baton: Baton, folder: Path) -> None:
    device, host = evaluated(baton, folder, "--policies device,host")["cells"]
    for cell in (device, host):
        assert (cell["is_exact"], cell["cost"], cell["same_choice"], cell["kv_share"]) == (True, 0, 1, 1)
        assert cell["perplexity"] == device["perplexity"] > 1
        assert (cell["picked_share"], cell["mass"], cell["num_found"]) == (None, None, None)
        assert len(cell["chunks"]) == NUM_STEPS
    assert (device["link_share"], host["link_share"]) == (0, 1)
    assert (device["home_share"], device["device_share"], host["home_share"]) == (1, 1, 1)
    assert host["device_share"] == pytest.approx(2 / 6)


def test_a_policy_that_picks_every_key_is_full_attention(baton: Baton, folder: Path) -> None:
    options = f"--policies infinigen,oracle --budget 1 --mass 1 --selection {folder / 'whole.safetensors'}"
    for cell in evaluated(baton, folder, options)["cells"]:
        assert (cell["is_exact"], cell["same_choice"], cell["kv_share"], cell["picked_share"]) == (False, 1, 1, 1)
        assert cell["cost"] == pytest.approx(0, abs=1e-5)
        assert cell["mass"] == pytest.approx(1, abs=1e-5)


def test_policies_are_read_on_a_device_with_memory_of_its_own(baton: Baton, folder: Path) -> None:
    """The same tokens; what crosses the link is what is fetched and stored."""
    options = f"--policies device,oracle,infinigen --budget 0.25 --selection {folder / 'whole.safetensors'}"
    at_home = evaluated(baton, folder, options)["cells"]
    apart = evaluated(baton, folder, f"{options} --device emulated --link 10GBps")
    assert ", device emulated;" in apart["title"]
    for cell, other in zip(apart["cells"], at_home, strict=True):
        assert cell["perplexity"] == pytest.approx(other["perplexity"], rel=0.02)  # lookahead 1 picks other keys
        assert cell["kv_share"] == pytest.approx(other["kv_share"], rel=0.05)
    device, oracle, infinigen = apart["cells"]
    assert device["link_share"] == oracle["link_share"] == 0
    assert 0 < oracle["device_share"] <= device["device_share"] == 1  # in smaller pages than those of rows
    assert 0 < infinigen["link_share"] < at_home[2]["link_share"]


def test_what_a_budget_reads_is_the_formula_s(baton: Baton, folder: Path) -> None:
    """Two layers of six whole; in the others the window's share of the keys, and the first two besides."""
    options = f"--policies window --budget 0.25,0.5 --selection {folder / 'whole.safetensors'} --mass 2"
    cells = evaluated(baton, folder, options)["cells"]
    lengths = range(CONTEXT + 1, CONTEXT + NUM_STEPS + 1)
    for cell, budget in zip(cells, (0.25, 0.5), strict=True):
        picked = [int(length * budget) + 2 for length in lengths]
        shares = [num / length for num, length in zip(picked, lengths, strict=True)]
        assert cell["setting"] == f"window whole {budget}"
        assert cell["kv_share"] == pytest.approx((2 * sum(lengths) + 4 * sum(picked)) / 6 / sum(lengths))
        assert cell["picked_share"] == pytest.approx(statistics.fmean(shares))
        assert cell["link_share"] == pytest.approx(cell["kv_share"] - 2 / 6)
        assert 0 < cell["mass"] < 1
    assert cells[0]["mass"] < cells[1]["mass"]
    assert cells[0]["cost"] != 0


@pytest.mark.skipif(not has_int4_kernel(), reason="needs a C++ compiler")
def test_picks_in_4_bits_are_as_many_and_a_part_of_the_bytes(baton: Baton, folder: Path) -> None:
    options = f"--policies infinigen,infinigen_int4 --budget 0.25 --selection {folder / 'whole.safetensors'} --mass 2"
    plain, packed = evaluated(baton, folder, options)["cells"]
    layout = load_decoder(folder, dtype="float32").layout
    part = layout.num_kv_heads * 2 * Int4Format(layout).head_bytes / layout.row_bytes
    assert (plain["setting"], packed["setting"]) == ("infinigen whole 0.25", "infinigen_int4 whole 0.25")
    assert packed["kv_share"] == pytest.approx(plain["kv_share"], rel=0.01)  # the first and the latest are chosen, too
    assert packed["link_share"] == pytest.approx(part * (packed["kv_share"] - 2 / 6))
    assert packed["home_share"] < plain["home_share"] == 1
    assert 0 < abs(packed["mass"] - plain["mass"]) < 0.05
    assert 0 < abs(packed["perplexity"] / plain["perplexity"] - 1) < 0.2


def test_heavy_hitters_keep_their_budget_of_the_prompt(baton: Baton, folder: Path) -> None:
    [cell] = evaluated(baton, folder, "--policies h2o --budget 0.5")["cells"]
    lengths = range(CONTEXT + 1, CONTEXT + NUM_STEPS + 1)
    assert cell["picked_share"] == pytest.approx(statistics.fmean(CONTEXT / 2 / length for length in lengths))
    assert (cell["setting"], cell["is_exact"]) == ("h2o 0.5", False)


def test_a_pool_keeps_its_part_and_evicts_in_every_way(baton: Baton, folder: Path) -> None:
    options = f"--policies infinigen --budget 0.3 --pool 0.5,1 --selection {folder / 'whole.safetensors'}"
    whole, *half, full, _, _ = evaluated(baton, folder, options)["cells"]
    assert (whole["setting"], whole["pool"], whole["eviction"]) == ("infinigen whole 0.3", None, None)
    assert [cell["setting"] for cell in half] == [
        f"infinigen whole 0.3 pool 0.5 {how}" for how in ("counter", "lru", "fifo")
    ]
    assert full["chunks"] == whole["chunks"]  # where nobody has to go
    for cell in half:
        assert cell["perplexity"] != whole["perplexity"]
        assert 0.8 * whole["picked_share"] < cell["picked_share"] < whole["picked_share"]  # not of what is kept


def test_the_table_and_the_plot(baton: Baton, folder: Path, tmp_path: Path) -> None:
    plot = tmp_path / "quality.png"
    options = f"{SMALL} --policies device,oracle --alpha 1,4 --mass 5 --needles --plot {plot}"
    options += f" --selection {folder / 'whole.safetensors'}"
    run = baton.run(f"evaluate {folder} --text {folder / 'text.txt'} {options}")
    assert run.status == 0
    title, *lines = run.out.splitlines()
    assert "2 rows of text.txt, 10 steps" in title
    quality, space = lines[1:5], lines[7:11]
    assert quality[0].split() == "context policy perplexity cost, % same choice mass needles".split()
    assert quality[1].split()[:2] == ["60", "device"] and "+0.0 +- 0.0" in quality[1]
    assert all(line.rstrip().endswith(" of 2") for line in quality[1:])
    assert space[0].split() == "context policy keys KV read link home device step, ms".split()
    for table in (quality, space):
        assert [line.split()[:4] for line in table[2:]] == [["60", "oracle", "whole", "alpha"]] * 2
    assert plot.read_bytes().startswith(PNG)


def test_settings_are_what_means_something_to_each_policy() -> None:
    assert settings("--policies device,window,infinigen,int4") == ["device", "window", "infinigen", "int4"]
    budgets = settings("--policies device,window,oracle --budget 0.2,0.1 --alpha 4")
    assert budgets == ["device", "window 0.1", "window 0.2", "oracle 0.1", "oracle 0.2", "oracle alpha 4"]
    files = settings("--policies infinigen --selection a/skew.safetensors b/columns.safetensors --budget 0.2")
    assert files == ["infinigen skew 0.2", "infinigen columns 0.2"]
    packed = settings("--policies infinigen_int4,int4 --selection a/skew.safetensors b/columns.safetensors --alpha 4")
    assert packed == ["infinigen_int4 skew alpha 4", "infinigen_int4 columns alpha 4", "int4"]
    own = settings("--policies device,window:0.23,infinigen,h2o:0.3 --alpha 4 --selection a/skew.safetensors")
    assert own == ["device", "window skew 0.23", "infinigen skew alpha 4", "h2o skew 0.3"]
    pools = settings("--policies device,infinigen --pool 0.8")
    assert pools == ["device", "infinigen", *(f"infinigen pool 0.8 {how}" for how in ("counter", "lru", "fifo"))]
    assert settings("--policies device,oracle --selection a/skew.safetensors b.safetensors") == [
        "device",
        "oracle skew",
    ]


def test_rows_read_parts_of_texts_that_do_not_overlap(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.txt", tmp_path / "packed.txt.gz"
    plain.write_text("\n".join(letter * 9 for letter in "abcdefgh"))
    packed.write_bytes(gzip.compress(b"x" * 99))
    texts = Texts(letter_tokenizer(), [plain, packed], 3)
    read = [text_of(passage.token_ids) for passage in texts.passages(20, 9)]  # in which a line's end leaves nothing
    assert read == ["aaaaaaaaabbbbbbbbbccccccccc", "x" * 30, "eeeeeeeeefffffffffggggggggg"]


def test_a_needle_is_told_in_the_first_half_and_asked_for_behind_the_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n".join("#" * 79 for _ in range(40)))
    needles = NeedleTexts(letter_tokenizer(), [path], 4).needles(200, 50)
    places = []
    for needle in needles:
        ids = needle.passage.token_ids
        told, asked = text_of(ids[:200]).strip("#"), text_of(ids[200:]).lstrip("#")
        assert told == f"{asked}." and told.startswith("The password of ")
        assert told.endswith(f"{text_of(ids[-needle.num_answer :])}.") and asked.count(" ") == 5
        places.append(ids.index(ids_of("T")[0]))
        assert text_of(ids[200:252]).startswith("#" * 50)
    assert places == [21, 41, 61, 81]  # behind a line's end
    assert len({needle.passage.num_steps for needle in needles}) == 1
    assert len({needle.passage.token_ids for needle in needles}) == 4


def test_needles_count_as_found_with_their_whole_answer() -> None:
    passage = Passage((*ids_of("context"), *ids_of(" is tin")), 7)
    material = Material([], [Context(passage, KvBuffer(LAYOUT, TokenRange(0, 7)))] * 3, [3, 3, 3])
    choices = torch.tensor([ids_of("??? tin"), ids_of("is ??in"), ids_of("is  tin")])
    assert num_found(choices, material) == 2


REFUSALS = {
    "--policies devise": "residency = 'devise' is unknown: use one of device, host",
    "--budget 1.5": "--budget: 1.5 is out of range",
    "--policies window:1.5": "--policies: 1.5 is out of range",
    "--policies window:": "--policies = '' is out of range",
    "--policies int4:0.2": "--policies int4:0.2: int4 has no budget, name it alone",
    "--alpha 0": "--alpha = '0' is out of range",
    "--pool 1.5": "--pool: 1.5 is out of range",
    "--context 502": "--context 502 and --steps 10 are beyond the 512 tokens that the model takes",
    "--rows 5 --context 400": "has 400 tokens, and 411 are read: give longer texts",
    "--plot quality.pdf": "the plot is a PNG",
    "--mass -1": "--mass: '-1' is out of range",
    "--link 4GBps": "--link has no effect without --device emulated",
    "--device emulated --link 4": "--link: '4' is not a rate",
    "--device emulated --link 0GBps": "--link: '0GBps' brings nothing",
    "--device emulated --mass 2": "--mass needs the keys in host memory",
    "--text nothing.txt": "--text nothing.txt cannot be read as UTF-8 text",
}


def refused(baton: Baton, folder: Path, options: str) -> str:
    """Return why a policy is refused."""
    run = baton.run(f"evaluate {folder} --text {folder / 'text.txt'} {SMALL} --policies {options}")
    assert run.status and run.out == "" and run.err.startswith("baton: ") and run.err.count("\n") == 1, run
    return run.err


@pytest.mark.parametrize("options", REFUSALS)
def test_refusals_are_one_line(baton: Baton, folder: Path, options: str) -> None:
    assert REFUSALS[options] in refused(baton, folder, f"device {options}")


def test_a_policy_that_needs_preparing_says_so(baton: Baton, folder: Path) -> None:
    assert "run `baton prepare`" in refused(baton, folder, "infinigen --selection nothing.safetensors")


def test_a_pool_without_room_for_what_stays_is_refused(baton: Baton, folder: Path) -> None:
    options = f"infinigen --pool 0.05 --selection {folder / 'whole.safetensors'}"
    assert "pool_tokens = 3 has no room for the 2 first and the 4 latest" in refused(baton, folder, options)


def test_help_needs_no_torch() -> None:
    program = "import sys, deploy.cli as c\ntry: c.main(['evaluate', '-h'])\nfinally: print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"

"""`baton plan --speculation`: MagicDec's curves as tables, JSON and a plot; one-line refusals."""

import pytest

from tests.support.wire.commands import Baton

LLAMA = "llama-3.1-8b --hardware a100 --chips 8 --speculation --acceptance 0.82 --draft-keys 512"


def test_the_worked_speedups_are_printed_and_in_the_json(baton: Baton) -> None:
    grid = f"{LLAMA} --batch 8,256 --context 4000,16000,32000"
    plan = baton.json(f"plan {grid}")
    speedups = [cell["speedup"] for cell in plan["cells"]]
    assert speedups == pytest.approx([1.00, 1.29, 1.24, 2.30, 1.52, 2.97], rel=0.04)
    assert plan["pays_from"]["8"] == pytest.approx(4000, rel=0.1)
    assert plan["acceptances"] == {"512": 0.82} and plan["draft_model"] is None
    rows = [line.split() for line in baton.shown(f"plan {grid}").splitlines()]
    assert ["32000", *(f"{cell['speedup']:.2f}/{cell['num_drafts']}" for cell in plan["cells"][-2:])] in [
        [cell.strip("()") for cell in row] for row in rows
    ]
    assert ["pays", "from", *map(str, plan["pays_from"].values())] in rows


def test_each_cell_s_parts_make_its_speedup(baton: Baton) -> None:
    for cell in baton.json(f"plan {LLAMA} --drafts 3 --batch 8,256 --context 1k,32k")["cells"]:
        assert cell["num_drafts"] == 3 and 0 < cell["kv_share"] < 1
        round_s = 3 * cell["draft_s"] + cell["verify_s"]
        assert cell["speedup"] == pytest.approx(cell["num_tokens"] * cell["plain_s"] / round_s)
        assert cell["draft_ratio"] == pytest.approx(cell["draft_s"] / cell["plain_s"])
        assert cell["verify_ratio"] == pytest.approx(cell["verify_s"] / cell["plain_s"])
        assert cell["tokens_s"] == pytest.approx(cell["batch"] * cell["num_tokens"] / round_s)


def test_by_default_drafts_may_be_left_out(baton: Baton) -> None:
    plan = baton.json("plan llama-3.1-8b --speculation")
    assert {cell["speedup"] for cell in plan["cells"] if cell["num_drafts"] == 0} == {1.0}
    assert plan["acceptances"] == {"512": 0.8}


def test_each_budget_has_its_acceptance_whatever_their_order(baton: Baton) -> None:
    grid = "llama-7b --hardware a100 --speculation --batch 256 --context 3000,32000"
    plan = baton.json(f"plan {grid} --draft-keys 1k,256 --acceptance 0.83,0.78")
    assert plan["acceptances"] == {"256": 0.78, "1024": 0.83}
    assert [cell["draft_keys"] for cell in plan["cells"]] == [256, 1024]
    assert "draft keys" in baton.shown(f"plan {grid} --draft-keys 1k,256 --acceptance 0.83,0.78")


def test_a_draft_model_s_weights_and_kv_count(baton: Baton) -> None:
    grid = "llama-7b --hardware a100 --speculation --batch 1 --context 32k"
    alone, helped = (baton.json(f"plan {grid}{more}") for more in ("", " --draft-model smollm2-135m"))
    assert helped["draft_model"]["num_params"] < alone["model"]["num_params"] / 20
    assert helped["cells"][0]["draft_s"] < alone["cells"][0]["draft_s"] / 20
    assert "smollm2-135m" in helped["title"]
    both = baton.json("plan llama-30b --hardware a100 --speculation --batch 1 --context 1k --draft-model llama-13b")
    assert not both["cells"][0]["fits"]
    assert baton.json("plan llama-30b --hardware a100 --speculation --batch 1 --context 1k")["cells"][0]["fits"]


def test_tables_say_that_they_are_a_bound(baton: Baton) -> None:
    assert "an upper bound" in baton.shown("plan llama-3.1-8b --speculation --draft-keys 256,512 --acceptance .8,.82")


def test_a_batch_for_which_drafts_never_pay(baton: Baton) -> None:
    assert baton.json("plan llama-3.1-8b --speculation --drafts 0 --batch 1")["pays_from"] == {"1": None}
    assert "never" in baton.shown("plan llama-3.1-8b --speculation --drafts 0 --batch 1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--acceptance 0.8", "--acceptance is an option of --speculation: add --speculation, or leave it out"),
        ("--draft-keys 512", "--draft-keys is an option of --speculation: add --speculation"),
        ("--drafts 3", "--drafts is an option of --speculation: add --speculation"),
        ("--draft-model llama-7b", "--draft-model is an option of --speculation: add --speculation"),
        ("--speculation --acceptance 1.5", "--acceptance: 1.5 is out of range: use a part of 1"),
        ("--speculation --acceptance often", "--acceptance = 'often' is out of range"),
        ("--speculation --acceptance .8,.9", "--acceptance gives 2 for 1 of --draft-keys: give one for each"),
        ("--speculation --draft-keys 1k,1024 --acceptance .8,.8", "--acceptance gives 2 for 1 of --draft-keys"),
        ("--speculation --draft-keys 0", "--draft-keys: '0' is out of range"),
        ("--speculation --drafts 65", "--drafts: '65' is out of range: use whole numbers from 0 to 64"),
        ("--speculation --draft-model gpt-5", "--draft-model: MODEL = 'gpt-5' neither exists nor is known"),
        ("--speculation --draft-model=", "--draft-model: no model given"),
        ("--speculation --draft-keys=", "--draft-keys: '' is out of range"),
    ],
)
def test_refusals_are_one_line_with_field_and_remedy(baton: Baton, arguments: str, text: str) -> None:
    assert text in baton.refusal(f"plan llama-13b {arguments}")

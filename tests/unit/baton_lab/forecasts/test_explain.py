"""`baton plan --explain`: the numbers that the study gives, in tables and as JSON, and one-line refusals."""

import re
from pathlib import Path

import pytest

from baton_lab.forecasts.explain import describe
from baton_lab.study.break_even import Span
from tests.support.folders import ROOT
from tests.support.wire.commands import Baton

SMALL = "--shape num_layers=2,hidden=64,num_heads=4,num_kv_heads=2,head_dim=16,ffn=128,vocab=100"
CASE = f"{SMALL} --explain --hardware cpu-core --prompt 1k --output 16 --rate 5"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_the_terms_are_those_of_the_cost_model_by_hand(baton: Baton) -> None:
    found = baton.json(f"plan {CASE} --ranks 1 --output 1")
    # Two layers, the last of which only its keys and values and the last token pass; 2.1e11 and 1.65e11 FLOP/s.
    linear_s, share = 2 * (64 * 16 * (4 + 4) + 64 * 16 * 4 + 3 * 64 * 128) / 2.1e11, 2 / 9
    pairs_s = 4 * 4 * 16 * 1024 * 1024 / 2 / 1.65e11
    assert found["prompt_kv_bytes"] == 1024 * 2 * (2 * 2 * 16 * 2)
    for side in ("apart", "together"):
        assert found[side]["terms"]["prefill_s"] == pytest.approx(1024 * linear_s * (1 + share) + pairs_s, rel=0.02)
        assert found[side]["terms"]["steps_s"] == 0  # no token but the first, so no rows
    assert found["apart"]["terms"]["transfer_s"] == pytest.approx(3e-4 + found["prompt_kv_bytes"] / 2 / 2e9)
    assert found["together"]["terms"]["transfer_s"] == 0
    assert found["num_together"] == 2


def test_slower_links_move_the_turn_to_longer_prompts(baton: Baton) -> None:
    def turn(link: str) -> float:
        spans = baton.json(f"plan {CASE} --rate 0.001 --link-gb-s {link}")["by_prompt"]["first token"]
        assert [span["better"] for span in spans] == ["together", "apart"]
        return float(spans[0]["last"])

    assert turn("0.2") > 2 * turn("1")


def test_tables_and_turns_are_shown(baton: Baton) -> None:
    found, out = baton.json(f"plan {CASE}"), baton.shown(f"plan {CASE}")
    assert "5 requests/s of 1024 tokens, 16 tokens of answer" in out
    first = " ".join(f"{found[side]['terms']['prefill_s'] * 1e3:.4g}" for side in ("apart", "together"))
    assert f"prefill, ms {first}" in " ".join(out.split())
    by_prompt = tuple(Span(**span) for span in found["by_prompt"]["first token"])
    assert f"first token: {describe(by_prompt, '')}" in out


def test_what_one_side_or_no_side_carries_is_said(baton: Baton) -> None:
    out = baton.shown(f"plan {CASE} --rate 1000000")
    assert "first token, ms full full" in " ".join(out.split())
    assert "by tokens of prompt first token: 16 to 8192: neither (both are full)" in " ".join(out.split())
    spans = (Span(1, 5, "together"), Span(6, 9, "only apart"))
    assert describe(spans, "") == "1 to 5: together; 6 to 9: only apart (together is full)"
    assert describe((), "") == "both are full at any rate"


def test_this_machine_is_predicted_by_what_a_cluster_here_would_go_by(smollm2: Path, baton: Baton) -> None:
    found = baton.json(f"plan {smollm2} --explain --hardware here --threads 1 --prompt 512 --rate 0.1")
    assert found["title"].startswith(f"{smollm2.name} on ")
    assert found["apart"]["num_ranks"] in (1, 2)
    assert found["num_together"] == 3


def test_the_documented_outputs_are_those_of_their_commands(baton: Baton) -> None:
    page = (ROOT / "docs/deployment.md").read_text()
    examples = re.findall(r"```\n\.venv/bin/baton plan ([^\n]*)\n```\n\n```\n(.*?)\n```", page, re.DOTALL)
    assert len(examples) == 2
    for arguments, told in examples:
        out = "\n".join(line.rstrip() for line in baton.shown(f"plan {arguments}").rstrip().splitlines())
        assert out == told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("llama-13b --prompt 1k", "--prompt is an option of --explain: add --explain"),
        ("llama-13b --explain --rate 0", "--rate = '0' is out of range"),
        ("llama-13b --explain --ranks 65", "--ranks: '65' is out of range: use whole numbers from 1 to 64"),
        ("llama-13b --explain --hardware tpu-v5e", "hardware = 'tpu-v5e' is unknown: use one of a100-eager"),
        ("llama-13b --explain --speculation", "--speculation is not supported with --explain"),
        ("llama-13b --explain --chips 8", "--chips: every worker of a break-even is one device"),
        ("--params 1e9 --kv-per-token 1e4 --explain", "--params: a break-even needs the model's shape"),
        ("smollm2-135m --explain --hardware here --link-gb-s 1", "--hardware here predicts by this machine's"),
    ],
)
def test_what_cannot_be_explained_is_refused_in_one_line(baton: Baton, arguments: str, text: str) -> None:
    assert text in baton.refusal(f"plan {arguments}")

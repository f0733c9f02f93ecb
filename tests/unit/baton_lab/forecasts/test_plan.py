"""`baton plan`: the roofline's numbers, from every way to name a model; one-line refusals; a plot that is a PNG."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.planning.chips import Chip
from baton.planning.model_shape import ModelShape
from deploy.machine import probe
from tests.support.folders import DATA
from tests.support.wire.commands import Baton

pytestmark = pytest.mark.integration

TABLES: dict[str, Any] = json.loads((DATA / "roofline_tables.json").read_text())
MHA = TABLES["mha"]
V5E_8 = "--hardware TPU-v5e --chips 8 --context 8k"
EXERCISE = "--shape num_layers=64,hidden=4096,num_heads=32,num_kv_heads={},head_dim=256,ffn=16384,vocab=32128,tied=1"
ALL_INT8 = "--weights int8 --kv int8 --hardware tpu-v5e --chips 16 --context 128000"
MACHINE = Chip(flops=5e11, memory_bandwidth=2e10, memory_bytes=1e10, kv_bandwidth=1e10, overlap=0.5, layer_s=2e-5)
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "rms_norm_eps": 1e-5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_the_source_s_table_to_the_last_digit(baton: Baton) -> None:
    """From the sizes that it starts from: 13e9 parameters, and 6.7e9 bytes of KV for 8,192 tokens."""
    batches = ",".join(map(str, MHA["batch"]))
    plan = baton.json(f"plan --params 13e9 --kv-per-token 817871.09375 {V5E_8} --batch {batches}")
    cells = plan["cells"]
    assert [cell["batch"] for cell in cells] == MHA["batch"]
    assert [round(cell["kv_bytes"] / 1e9, 1) for cell in cells] == MHA["kv_gib"]
    assert [round(cell["total_bytes"] / 1e9, 1) for cell in cells] == MHA["total_gib"]
    assert [round(cell["step_s"] * 1e3, 2) for cell in cells] == MHA["step_ms"]
    assert [round(cell["tokens_s"], 2) for cell in cells] == MHA["tokens_s"]
    assert [cell["fits"] for cell in cells] == [True, True, False, False, False, False]


def test_the_source_s_table_by_the_model_s_name(baton: Baton) -> None:
    plan = baton.json(f"plan llama-13b {V5E_8} --batch 1,240")
    times = [cell["step_s"] * 1e3 for cell in plan["cells"]]
    assert times == pytest.approx([MHA["step_ms"][0], MHA["step_ms"][-1]], rel=0.005)
    assert round(plan["critical_batch"]) == TABLES["critical_batch"]["tpu_v5e_bf16"]


@pytest.mark.parametrize(("kv_heads", "entry"), [(8, "max_batch_128k_on_4x4"), (1, "max_batch_128k_one_kv_head")])
def test_the_source_s_exercise_by_its_shape(baton: Baton, kv_heads: int, entry: str) -> None:
    plan = baton.json(f"plan {EXERCISE.format(kv_heads)} {ALL_INT8}")
    assert plan["largest_batch"] == {"128000": TABLES["exercise_model"][entry]}


def test_the_source_s_mixture(baton: Baton) -> None:
    plan = baton.json(f"plan {EXERCISE.format(8)},experts=16,active_experts=2 --hardware tpu-v5e")
    assert plan["model"]["num_params"] == pytest.approx(212e9, abs=0.5e9)
    assert plan["critical_batch"] == pytest.approx(1920, abs=5)


def test_tables_hold_the_numbers(baton: Baton) -> None:
    out = baton.shown(f"plan llama-13b {V5E_8} --batch 1,16")
    assert "13.02e9, 26.03 GB of 128 GB" in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("8192")]
    assert rows == [["8192", "6.711", "15", "4.991w", "(20.34k)"], ["8192", "6.711", "15", "200.4", "(786.8)"]]


def test_weights_that_do_not_fit_are_said(baton: Baton) -> None:
    assert "26.03 GB of 16 GB: they do not fit" in baton.shown("plan llama-13b --hardware tpu-v5e")


def test_a_folder_is_read_like_a_name(baton: Baton, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = baton.json(f"plan {tmp_path}")["model"]
    layer = 64 * 16 * (4 + 2 * 2) + 64 * 64 + 3 * 64 * 128
    assert model["num_params"] == 2 * layer + 100 * 64
    assert model["kv_token_bytes"] == 2 * 2 * 2 * 16 * 2


def test_int8_halves_what_is_read(baton: Baton) -> None:
    whole, half = (
        baton.json(f"plan llama-3.1-8b --batch 1 --context 8k {formats}")
        for formats in ("", "--weights int8 --kv int8")
    )
    assert half["cells"][0]["step_s"] == pytest.approx(whole["cells"][0]["step_s"] / 2)
    assert half["critical_batch"] == pytest.approx(whole["critical_batch"] / 2)


@pytest.mark.parametrize(("spread", "doubt"), [(1.1, ""), (1.5, "repeats differ 1.5 times: this machine is busy")])
def test_here_measures_with_the_model_s_shape(
    monkeypatch: pytest.MonkeyPatch, baton: Baton, spread: float, doubt: str
) -> None:
    asked = list[object]()

    def measure(
        shape: ModelShape, dtype: str, num_threads: int, memory_bytes: float, *, weights: str
    ) -> probe.MeasuredRates:
        assert memory_bytes > 0
        asked.append((shape.hidden, shape.dtype_bytes, dtype, num_threads, weights))
        return probe.MeasuredRates(MACHINE, spread)

    monkeypatch.setattr(probe, "measure", measure)
    run = baton.run("plan smollm2-135m --hardware here --threads 2 --dtype float32 --batch 1 --context 1k")
    assert run.status == 0
    assert doubt in run.err if doubt else not run.err
    assert asked == [(576, 4, "float32", 2, "stored")]
    text = " ".join(run.out.split())
    assert "this machine, measured with 2 threads" in text
    assert "reads 20 GB/s, computes 0.5 TFLOP/s, attends to 10 GB/s, 20 us a layer in addition, 50% overlapped" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "no model given: give one of MODEL"),
        ("llama-13b --shape hidden=2", "MODEL and --shape given: give one of"),
        ("--params 1e9", "--params and --kv-per-token describe a model together"),
        ("llama-13b --kv-per-token 4", "--params and --kv-per-token describe a model together"),
        ("--params much --kv-per-token 4", "--params = 'much' is out of range: use a number above 0"),
        ("gpt-5", "MODEL = 'gpt-5' neither exists nor is known: give a folder with config.json"),
        ("llama-13b --hardware abacus", "hardware = 'abacus' is unknown: use one of tpu-v5e"),
        ("llama-13b --batch 0", "--batch: '0' is out of range: use whole numbers from 1 to"),
        ("llama-13b --context 8kk", "--context: '8kk'"),
        ("llama-13b --chips two", "--chips: 'two'"),
        ("llama-13b --threads 2", "--threads applies to this machine only: add --hardware here"),
        ("llama-13b --dtype float32", "--dtype = 'float32': h100 is known by its bfloat16 rate only"),
        ("--shape num_layers", "--shape: 'num_layers' is not FIELD=NUMBER"),
        ("--shape num_layers=2", "--shape: hidden is missing"),
        ("--shape num_layers=\u00b2", "is not FIELD=NUMBER"),
        (f"{EXERCISE.format(8)},experts=2,active_experts=3", "experts: 3 of 2"),
        ("--params 1e9 --kv-per-token 4 --hardware here", "--hardware here measures with the model's matrices"),
        ("smollm2-135m --plot plot.jpg", "--plot = 'plot.jpg': the plot is a PNG"),
        ("smollm2-135m --plot no/folder/plot.png", "cannot be written (No such file or directory)"),
    ],
)
def test_refusals_are_one_line_with_field_and_remedy(baton: Baton, arguments: str, text: str) -> None:
    assert text in baton.refusal(f"plan {arguments}", may_show=True)


def test_a_plan_needs_no_torch() -> None:
    program = "import sys; from deploy.cli import main; main(['plan', 'llama-13b']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"

"""What a worker takes of its node's memory: at least its weights and the KV that it cannot do without."""

from pathlib import Path

from deploy.config.file import load_config
from deploy.machine.cluster_plan import WORKER_BYTES, ClusterPlan
from deploy.machine.resolved_model import ResolvedModel

TOKEN_BYTES = 23_040
"""KV of a token of SmolLM2-135M in bf16 (DESIGN.md, section 8)."""


def test_workers_have_the_weights_and_the_kv_of_one_slot(smollm2: Path) -> None:
    weights = WORKER_BYTES + ResolvedModel(smollm2).weight_bytes("bfloat16")
    whole = weights + 1000 * TOKEN_BYTES
    assert ClusterPlan(load_config(None, ["generate.max_slot_tokens=1000"]), ResolvedModel(smollm2)).worker_bytes() == {
        "prefill": whole,
        "generate": whole,
    }
    most = ClusterPlan(load_config(None, ["generate.max_slot_tokens=100000"]), ResolvedModel(smollm2)).worker_bytes()
    assert most["prefill"] == weights + 8192 * TOKEN_BYTES  # the model has no more positions


def test_an_engine_has_the_memory_that_is_configured_and_a_model_that_drafts(smollm2: Path) -> None:
    settings = ["generate.max_slot_tokens=1000", 'generate.kv_memory_bytes="1GiB"', "model.dtype=float32"]
    weights = ResolvedModel(smollm2).weight_bytes("float32")
    plain = ClusterPlan(load_config(None, settings), ResolvedModel(smollm2)).worker_bytes()
    assert plain == {"prefill": WORKER_BYTES + weights + 2000 * TOKEN_BYTES, "generate": WORKER_BYTES + weights + 2**30}
    drafting = [*settings, "generate.speculation=model", f"generate.draft_model={smollm2}"]
    assert (
        ClusterPlan(load_config(None, drafting), ResolvedModel(smollm2)).worker_bytes()["generate"]
        == plain["generate"] + weights
    )

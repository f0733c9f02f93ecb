"""Gains of speculation by the roofline, against numbers worked out beforehand and statements of the paper."""

import json
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.planning.chips import Chip
from baton.planning.hardware import cpu_rank
from baton.planning.work_cost import expected_tokens
from baton_lab.study.known_hardware import CHIPS
from baton_lab.study.known_models import shape_of
from baton_lab.study.roofline import ServedModel, served, step_time
from baton_lab.study.speculation import Drafting, DraftRound, best_round, pays_from
from tests.support.folders import DATA

FIGURES: dict[str, Any] = json.loads((DATA / "magicdec_figures.json").read_text())
LLAMA_3 = served(shape_of("llama-3.1-8b"), tied=False, weight_bytes=2, kv_bytes=2)
LLAMA_2 = served(shape_of("llama-7b"), tied=False, weight_bytes=2, kv_bytes=2)
A100 = CHIPS["a100"]
REACHED = replace(A100, flops=2.8e14)
"""An A100 with nine tenths of its FLOP/s, of which the worked numbers are."""
CPU = Chip(flops=cpu_rank(2, 2).linear_flops, memory_bandwidth=cpu_rank(2, 2).memory_bandwidth, memory_bytes=16e9)
"""Two cores."""
BATCHES = (8, 16, 32, 64, 128, 256)
CONTEXTS = (1000, 4000, 16000, 32000)
WORKED = {1000: (0.92, 0.82), 4000: (1.00, 1.29), 16000: (1.24, 2.30), 32000: (1.52, 2.97)}
"""Speedups of Llama-3.1-8B on eight A100, worked out beforehand: by context, of 8 and of 256 rows."""
MUST = Drafting({512: 0.82}, range(1, 9))
"""At least one draft, as in the worked numbers."""
MAY = Drafting({512: 0.82})


def found(
    batch: int, context: int, drafting: Drafting = MAY, chip: Chip = A100, model: ServedModel = LLAMA_3
) -> DraftRound:
    return best_round(model, chip, drafting, batch=batch, context=context, num_chips=8)


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_worked_numbers(context: int) -> None:
    for batch, worked in zip((8, 256), WORKED[context], strict=True):
        assert found(batch, context, MUST, REACHED).speedup == pytest.approx(worked, abs=0.006)
        assert found(batch, context, MUST).speedup == pytest.approx(worked, rel=0.04)


def test_a_round_by_hand() -> None:
    """One chip that computes 100 FLOP/s and reads 10 bytes/s; a model of 5 parameters and 2 bytes of KV a token."""
    model = ServedModel(num_params=5, kv_token_bytes=2, weight_bytes=2, pair_flops=4)
    chip = Chip(flops=100, memory_bandwidth=10, memory_bytes=1000)
    round_ = best_round(model, chip, Drafting({4: 0.5}, [3]), batch=4, context=30)
    assert round_.plain_s == pytest.approx(1 + 4 * 30 * 2 / 10)
    assert round_.draft_s == pytest.approx(1 + 4 * 4 * 2 / 10)
    assert round_.verify_s == pytest.approx(4 * 4 * 10 / 100 + 24)  # computing takes longer than reading the weights
    assert round_.num_tokens == 1.875
    assert round_.speedup == pytest.approx(25 * 1.875 / (3 * 4.2 + 25.6))
    verifying = best_round(model, chip, Drafting({4: 0.5}, [7]), batch=4, context=30)
    assert verifying.verify_s == pytest.approx(4 * 8 * 10 / 100 + 8 * 4 * 30 * 4 / 100)  # so does comparing


def test_from_about_4000_tokens_on_the_speedup_grows_with_the_batch() -> None:
    """The paper's inflection length on eight A100."""
    assert FIGURES["inflection_tokens_llama31_8b_8xA100"] == "about 4000"

    def grows(context: int) -> bool:
        speedups = [found(batch, context, MUST).speedup for batch in BATCHES]
        return speedups == sorted(speedups)

    growing = [context for context in range(1000, 8001, 250) if grows(context)]
    assert 3500 <= growing[0] <= 4500 and growing == list(range(growing[0], 8001, 250))


def test_speculation_pays_from_a_length_on() -> None:
    lengths = {batch: pays_from(LLAMA_3, A100, MAY, batch=batch, longest=2**17, num_chips=8) for batch in BATCHES}
    assert lengths[8] == pytest.approx(4000, rel=0.1)
    for batch, length in lengths.items():
        assert length is not None
        assert found(batch, length - 1).num_drafts == 0 and found(batch, length).num_drafts > 0
    assert pays_from(LLAMA_3, A100, MAY, batch=8, longest=2000, num_chips=8) is None
    assert pays_from(LLAMA_3, A100, Drafting({512: 0.0}), batch=256, longest=2**20) is None


def test_more_rows_or_tokens_take_more_drafts() -> None:
    """So do the numbers of drafts that the authors found best."""
    for context in CONTEXTS[1:]:
        numbers = [found(batch, context).num_drafts for batch in BATCHES]
        assert numbers == sorted(numbers) and numbers[0] < numbers[-1]
    numbers = [found(256, context).num_drafts for context in CONTEXTS]
    assert numbers == sorted(set(numbers))


def test_drafts_that_may_be_left_out_never_cost() -> None:
    grid = [found(batch, context) for batch in (1, *BATCHES) for context in (100, 512, *CONTEXTS)]
    assert all(each.speedup >= 1 for each in grid)
    assert {each.speedup for each in grid if not each.num_drafts} == {1.0}
    assert min(found(batch, 1000, MUST).speedup for batch in BATCHES) < 0.9


@pytest.mark.parametrize("batch", BATCHES)
def test_the_speedup_grows_with_context_up_to_a_bound(batch: int) -> None:
    speedups = [found(batch, context, MUST).speedup for context in (512, *CONTEXTS, 10**5, 10**6)]
    assert speedups == sorted(speedups)
    assert speedups[-1] < expected_tokens(0.82, 8)


def test_measured_speedups_are_below_the_bound() -> None:
    models = {"llama-3.1-8b": LLAMA_3, "llama-2-7b-32k": LLAMA_2}
    for row in FIGURES["self_speculation_streamingllm_8xA100"]:
        drafting = Drafting({512: 0.84}, [row["gamma"]])
        bound = found(row["batch"], row["prefill"], drafting, model=models[row["model"]]).speedup
        assert 1 < row["speedup"] < bound


def test_one_kv_head_for_several_query_heads_pays_later() -> None:
    """Paper, section 3.2: less KV needs longer contexts until reading it is what takes time."""
    grouped, whole = (pays_from(model, A100, MAY, batch=256, longest=2**17) for model in (LLAMA_3, LLAMA_2))
    assert grouped is not None and whole is not None and whole < 0.6 * grouped


def test_computing_that_costs_little_beside_reading_is_what_speculation_lives_on() -> None:
    """Paper, section 3.2: the more FLOPs a byte of bandwidth, the earlier it pays, and the more it gains."""
    chips = (CHIPS["h100"], A100, CPU)
    lengths = [pays_from(LLAMA_3, chip, MAY, batch=256, longest=2**17) for chip in chips]
    gains = [best_round(LLAMA_3, chip, MAY, batch=64, context=8000).speedup for chip in chips]
    assert all(lengths) and lengths == sorted(lengths, key=lambda length: length or 0)
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.2 * gains[-1]


def test_of_several_budgets_the_one_that_gains_most() -> None:
    """Paper, section 4.3: longer contexts bear more draft keys."""
    drafting = Drafting({256: 0.78, 1024: 0.83})
    assert best_round(LLAMA_2, A100, drafting, batch=256, context=32000).draft_keys == 1024
    short = best_round(LLAMA_2, A100, drafting, batch=256, context=3000)
    assert short.draft_keys == 256
    alone = [Drafting({keys: acceptance}) for keys, acceptance in drafting.acceptances.items()]
    speedups = [best_round(LLAMA_2, A100, each, batch=256, context=3000).speedup for each in alone]
    assert short.speedup == max(speedups) > min(speedups)


def test_a_small_model_drafts_better_for_few_rows_and_the_model_itself_for_many() -> None:
    """Paper, section 4.2: the small model saves reading weights, but its drafts are accepted less often."""
    small = served(shape_of("smollm2-135m"), tied=True, weight_bytes=2, kv_bytes=2)
    for batch, small_wins in ((1, True), (256, False)):
        by_small = found(batch, 32000, Drafting({512: 0.6}, model=small)).speedup
        assert (by_small > found(batch, 32000).speedup) == small_wins


def test_a_draft_step_reads_no_more_than_there_is() -> None:
    assert found(8, 100, MUST).draft_s == step_time(LLAMA_3, A100, batch=8, context=100, num_chips=8).total_s


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Drafting({}), "no draft_keys"),
        (lambda: Drafting({512: 0.8}, []), "no numbers of drafts"),
        (lambda: Drafting({512: 1.1}), "acceptance = 1.1 with 512 draft_keys is out of range"),
        (lambda: Drafting({0: 0.8}), "with 0 draft_keys is out of range"),
        (lambda: Drafting({512: 0.8}, [-1, 2]), "-1 drafts are out of range"),
    ],
)
def test_refusals(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()

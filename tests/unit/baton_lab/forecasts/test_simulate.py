"""`baton simulate`: tables that say what the cost model says, one-line refusals, a plot that is a PNG."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON, Kernel
from baton.planning.hardware import CPU_CORE, Hardware, derive
from baton_lab.study.known_hardware import HARDWARE
from baton_lab.study.known_models import SHAPES
from baton_lab.study.peers import single
from baton_lab.study.protocols import PAPER
from tests.support.wire.commands import Baton


def numbers(out: str, first: str) -> list[list[float]]:
    """The rows that begin with a word, as numbers."""
    rows = [line.split() for line in out.splitlines() if line.split()[:1] == [first]]
    return [[float(word) for word in row if re.fullmatch(r"[\d.]+", word)] for row in rows]


def test_table_holds_the_predictions(baton: Baton) -> None:
    out = baton.shown("simulate --ranks 4 --contexts 8k")
    cost = derive(SHAPES["llama-3.1-8b"], HARDWARE["h100-flash"])
    searched = float(chain_ttft(search(8192, 4, cost, BATON), cost, BATON))
    times, by_ranks = numbers(out, "8192")
    assert times[1] == pytest.approx(single(8192, cost, Kernel.CAUSAL), abs=1e-4)
    assert times[3] == by_ranks[2] == pytest.approx(searched, abs=1e-4)
    assert len(times) == 10
    assert sum(by_ranks[4:]) == pytest.approx(100, abs=2)


def test_slow_links_move_tokens_to_the_last_rank(baton: Baton) -> None:
    row = numbers(baton.shown("simulate --link-gb-s 1 --ranks 4 --contexts 8k"), "8192")[1]
    assert row[-1] == 76


def test_paper_protocol_on_the_papers_machine(baton: Baton) -> None:
    arguments = "--model llama-7b --hardware a100-eager --protocol paper --ranks 4 --contexts 16k"
    row = numbers(baton.shown(f"simulate {arguments}"), "16384")[0]
    cost = derive(SHAPES["llama-7b"], HARDWARE["a100-eager"])
    assert row[3] == pytest.approx(float(chain_ttft(search(16384, 4, cost, PAPER), cost, PAPER)), abs=1e-3)
    assert row[3] == pytest.approx(1.24, rel=0.05)
    assert row[5] == pytest.approx(1.76, rel=0.05)


def test_every_number_can_be_given(baton: Baton) -> None:
    """One layer, one head of one column, one FLOP each: 2 weights for q and o, 2 for k and v, 2 for a plain FFN."""
    shape = "num_layers=1,hidden=1,num_heads=1,num_kv_heads=1,head_dim=1,ffn=1,vocab=1,gated=0"
    rates = "--linear-tflop-s 1e-12 --attention-tflop-s 1e-12 --link-us 0 --link-gb-s 1 --push-gb-s 1"
    row = numbers(baton.shown(f"simulate --shape {shape} {rates} --ranks 2 --contexts 10"), "10")[0]
    assert row[1] == 12 * 10 + 4 * 50 + 2


def test_cached_tokens_and_push_take_longer(baton: Baton) -> None:
    plain, cached, pushed = (
        numbers(baton.shown(f"simulate --ranks 2 --contexts 4k {more}"), "4096")[0]
        for more in ("", "--cached 64k", "--push-gb-s 0.5")
    )
    assert cached[3] > 1.5 * plain[3] and pushed[3] > 1.5 * plain[3]
    assert pushed[5] == plain[5]


def test_this_machine_is_predicted_by_its_rates(baton: Baton, keep_core: Callable[[Hardware], None]) -> None:
    measured = replace(CPU_CORE, linear_flops=3e10, pair_flops=4e10)
    nominal = "nominal rates: `baton calibrate` measures them"
    for rates, basis in ((CPU_CORE, nominal), (measured, "measured rates")):
        out = baton.shown("simulate --model smollm2-135m --hardware here --ranks 2 --contexts 1k")
        assert f"smollm2-135m on here ({basis}), links 2 GB/s and 100 us" in " ".join(out.split())
        alone_s = single(1024, derive(SHAPES["smollm2-135m"], rates), Kernel.CAUSAL)
        assert numbers(out, "1024")[0][1] == pytest.approx(alone_s, rel=1e-3)
        keep_core(measured)


@pytest.mark.usefixtures("keep_core")
def test_rates_that_are_given_replace_those_of_this_machine(baton: Baton) -> None:
    model = "simulate --model smollm2-135m --ranks 2 --contexts 1k"
    rates = "--linear-tflop-s 0.5 --attention-tflop-s 0.25 --link-gb-s 3"
    here, core = (numbers(baton.shown(f"{model} --hardware {name} {rates}"), "1024") for name in ("here", "cpu-core"))
    assert here == core
    assert here != numbers(baton.shown(f"{model} --hardware here"), "1024")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--ranks 0", "--ranks: '0' is out of range: use whole numbers from 1 to 64"),
        ("--ranks 2,two", "--ranks: 'two'"),
        ("--contexts 8kk", "--contexts: '8kk'"),
        ("--cached -1", "--cached: '-1'"),
        ("--link-gb-s 0", "--link-gb-s = '0' is out of range: use a number above 0"),
        ("--link-us nan", "--link-us = 'nan'"),
        ("--push-gb-s fast", "--push-gb-s = 'fast'"),
        ("--model gpt-5", "model = 'gpt-5' is unknown: use one of llama-7b"),
        ("--hardware abacus", "hardware = 'abacus' is unknown: use one of a100-eager"),
        ("--protocol http", "--protocol = 'http' is unknown: use one of paper"),
        ("--shape num_layers", "--shape: 'num_layers' is not FIELD=NUMBER"),
        ("--shape num_layers=2", "--shape: hidden is missing"),
        ("--shape depth=2", "--shape: depth is not a field"),
        ("--shape num_layers=2 --model llama-7b", "--shape and --model say the same"),
        ("--contexts 64 --ranks 2 --plot plot.jpg", "--plot = 'plot.jpg': the plot is a PNG"),
        ("--contexts 64 --ranks 2 --plot no/folder/plot.png", "cannot be written (No such file or directory)"),
    ],
)
def test_refusals_are_one_line_with_field_and_remedy(baton: Baton, arguments: str, text: str) -> None:
    assert text in baton.refusal(f"simulate {arguments}", may_show=True)

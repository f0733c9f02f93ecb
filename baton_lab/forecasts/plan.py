"""`baton plan`: predicts the duration of a generation step, tokens per second, and the batch that fits into memory.

It needs no cluster and no weights, because it uses the roofline model (`baton_lab.study.roofline`). With `--hardware
here`, it first measures this machine (`deploy.machine.probe`). torch is needed only in two cases: for this measurement,
and to read the configuration of a MODEL that is not a built-in name.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from baton.planning.chips import Chip
from baton_lab.forecasts import explain, speculation
from baton_lab.forecasts.plan_options import DEFAULT_CHIP, find_chip, find_model
from baton_lab.forecasts.plan_results import SpeculationForecast, StepCell, StepForecast
from baton_lab.study.known_hardware import CHIPS
from baton_lab.study.roofline import ServedModel, critical_batch, largest_batch, step_time
from deploy.options import numbers as option_values
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from rich.table import Table

MAX_BATCH = 2**16
MAX_CHIPS = 2**14
MAX_TOKENS = 2**24
_MARKS = {"kv": "k", "weights": "w", "compute": "c", "calls": "o"}

_DESCRIPTION = """\
Predicts generation: the time of a step, the tokens per second, and the largest batch that fits into memory. A step
generates one token for each sequence of the batch. The prediction uses the roofline model of "How To Scale Your Model",
part 7:

  step = batch * KV bytes / bandwidth + max(2 * batch * parameters / FLOP/s, weight bytes / bandwidth)

For an accelerator, the rates are those of the data sheet, and the predicted time is a lower bound. With
--hardware=here, the command measures the rates of this machine in a few seconds, and predicts its step times.

With --speculation, the command predicts the speedup of speculative decoding, and the context length at which it begins
to pay. The speedup is an upper bound, on all hardware (MagicDec, figures 2 to 4; docs/speculation.md).

With --explain, the command compares two arrangements of the same workers: apart (prefill groups compute prompts, and
engines generate) and together (every worker is an engine that does both). It prints the prompt lengths and the rates of
requests at which each of them is faster (docs/deployment.md).

MODEL is a name (smollm2-135m, llama-3.1-8b, llama-13b, ...), a Hugging Face folder (config.json is enough), or a GGUF
file. The suffix k multiplies a number by 1024. GB and kB are 1e9 and 1e3 bytes."""

_EXAMPLES = """\
examples:
  baton plan llama-3.1-8b --hardware H100 --context 8k
  baton plan llama-13b --hardware tpu-v5e --chips 8 --weights int8 --batch 1,16,240 --plot steps.png
  baton plan smollm2-135m --hardware here --threads 2
  baton plan llama-3.1-8b --hardware a100 --chips 8 --speculation --acceptance 0.82 --draft-keys 512 --plot gains.png
  baton plan llama-3.1-8b --explain --prompt 8k --output 256 --rate 2 --ranks 2
  baton plan --params 30e9 --kv-per-token 100e3 --weights int8 --hardware tpu-v5e --chips 16 --context 8k"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `plan` command to the command line."""
    text = "predict step time, tokens per second and memory of generation"
    parser = add_command(commands, run, "plan", text, _DESCRIPTION, examples=_EXAMPLES)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model: name, Hugging Face folder, or GGUF file")
    batches, contexts = "1,8,16,32,64,256", "1k,4k,8k,32k"
    text = "batch sizes in sequences (default: %(default)s)"
    parser.add_argument("--batch", default=batches, metavar="N,N,...", help=text)
    text = "context lengths in tokens (default: %(default)s)"
    parser.add_argument("--context", default=contexts, metavar="N,N,...", help=text)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file for a plot; needs the extra 'lab'")
    model = parser.add_argument_group("model")
    text = "data type of weights and KV (default: bfloat16)"
    model.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help=text)
    model.add_argument("--weights", choices=("int8",), help="number format of weights (default: that of --dtype)")
    text = "number format of KV (default: that of --dtype); not supported by servers"
    model.add_argument("--kv", choices=("int8",), help=text)
    model.add_argument(
        "--shape",
        metavar="FIELD=N,...",
        help="shape of a model, instead of MODEL. Required: num_layers, hidden, num_heads, num_kv_heads, head_dim, ffn,"
        " vocab. Optional: gated=0 (feed-forward network without a gate), tied=1 (one matrix for embedding and output"
        " head), experts, active_experts (per token)",
    )
    text = "number of parameters of a model, instead of MODEL; needs --kv-per-token"
    model.add_argument("--params", metavar="N", help=text)
    text = "number of bytes of KV of one token in all layers; needs --params"
    model.add_argument("--kv-per-token", metavar="N", help=text)
    hardware = parser.add_argument_group("hardware")
    known = f"hardware: {', '.join(CHIPS)}, or here for this machine (default: {DEFAULT_CHIP})"
    hardware.add_argument("--hardware", metavar="NAME", help=known)
    hardware.add_argument(
        "--chips", default="1", metavar="N", help="number of chips the model is sharded over (default: 1)"
    )
    text = "number of compute threads, with --hardware=here (default: one for each core)"
    hardware.add_argument("--threads", metavar="N", help=text)
    speculation.add_options(parser)
    explain.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton plan`; return the exit status."""
    # Imported here and below, so that --help and invalid options are answered at once.
    from rich.console import Console

    plan = make_plan(args)
    console = Console(highlight=False)
    if args.json:
        print(json.dumps(asdict(plan)))
    elif isinstance(plan, SpeculationForecast):
        speculation.show(plan, console)
    elif isinstance(plan, explain.Explanation):
        explain.show(plan, console)
    else:
        console.print(f"[bold]{plan.title}[/]", soft_wrap=True)
        console.print(summary(plan), "")
        console.print(
            cells_table(plan, "step, ms", lambda cell: f"{_short(cell.step_s * 1e3)}{_MARKS[cell.bound]}"), ""
        )
        console.print(cells_table(plan, "tokens/s, all rows", lambda cell: _short(cell.tokens_s)), "")
        console.print("(in brackets: does not fit)  largest part: k KV, w weights, c computing, o other", style="dim")
    if args.plot is not None and not isinstance(plan, explain.Explanation):
        from baton_lab.forecasts.plan_plot import draw, draw_speculation

        if isinstance(plan, SpeculationForecast):
            draw_speculation(plan, args.plot)
        else:
            draw(plan, args.plot)
    return 0


def make_plan(args: argparse.Namespace) -> StepForecast | SpeculationForecast | explain.Explanation:
    """Compute what the options request: a forecast of steps, a forecast of speculation, or the comparison of --explain.
    With `--hardware here`, blocks while it measures. Raises the errors of `find_model`."""
    speculation.check_options(args)
    explain.check_options(args)
    if args.explain:
        return explain.make_explanation(args)
    batches = option_values.counts("--batch", args.batch, MAX_BATCH)
    contexts = option_values.counts("--context", args.context, MAX_TOKENS)
    num_chips = option_values.count("--chips", args.chips, MAX_CHIPS)
    if args.speculation:
        return speculation.make_forecast(args, batches, contexts, num_chips)
    named = find_model(args)
    hardware, chip = find_chip(args, named.shape)
    return StepForecast(
        title=f"{named.name}, {named.formats}, on {num_chips} x {hardware}",
        model=named.model,
        chip=chip,
        num_chips=num_chips,
        critical_batch=critical_batch(named.model, chip),
        largest_batch={context: largest_batch(named.model, chip, context, num_chips) for context in contexts},
        cells=tuple(_cell(named.model, chip, num_chips, (batch, at)) for at in contexts for batch in batches),
    )


def _cell(model: ServedModel, chip: Chip, num_chips: int, size: tuple[int, int]) -> StepCell:
    batch, context = size
    step = step_time(model, chip, batch=batch, context=context, num_chips=num_chips)
    kv_bytes = batch * model.kv_bytes(context)
    return StepCell(
        batch=batch,
        context=context,
        kv_bytes=kv_bytes,
        total_bytes=kv_bytes + model.all_weight_bytes,
        fits=kv_bytes + model.all_weight_bytes <= chip.memory_bytes * num_chips,
        step_s=step.total_s,
        attention_s=step.attention_s,
        linear_s=step.linear_s,
        other_s=step.other_s,
        bound=step.bound,
        tokens_s=batch / step.total_s,
    )


def summary(plan: StepForecast) -> "Table":
    """Return a table of the predicted values that do not depend on batch size and context length."""
    from rich.table import Table

    model = plan.model
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    memory = plan.chip.memory_bytes * plan.num_chips
    weights = f"{model.num_params / 1e9:.4g}e9, {_gb(model.all_weight_bytes)} GB of {_gb(memory)} GB"
    if model.all_weight_bytes > memory:
        weights += ": they do not fit"
    table.add_row("parameters", weights)
    table.add_row("KV of a token", f"{model.kv_token_bytes / 1e3:.4g} kB")
    table.add_row("critical batch", f"{plan.critical_batch:.0f} rows: larger ones are bound by compute")
    table.add_row("each", str(plan.chip))
    return table


def cells_table(plan: StepForecast, title: str, show: Callable[[StepCell], str]) -> "Table":
    """Return a table with one line per context length and one column per batch size. `show` formats a prediction as the
    text of its cell."""
    from deploy.options.screen import number_table

    batches = dict.fromkeys(str(cell.batch) for cell in plan.cells)
    table = number_table(title, ("context", "KV, GB", "most rows", *batches))
    for context, largest in plan.largest_batch.items():
        cells = [cell for cell in plan.cells if cell.context == context]
        shown = [show(cell) if cell.fits else f"[dim]({show(cell)})[/]" for cell in cells]
        table.add_row(str(context), _gb(plan.model.kv_bytes(context)), str(largest), *shown)
    return table


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.4g}"


def _short(value: float) -> str:
    """Format a number with four digits and without an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")

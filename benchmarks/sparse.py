"""Benchmark of sparse attention: measures the speedup of steps that attend to only some of the keys.

Compares the policies `infinigen` and `device` (`generate_workers.residency`) on the same sequences of different
lengths. The sequences contain the beginning of a novel, because the number of selected keys depends on the text. A step
feeds the next token of the novel to every sequence. It includes decoder, policy, logits and greedy sampling, without
the engine's other work. The policies alternate. Each time, a policy runs one warm-up step and two measured steps.

The file given by `--selection`, or else the file that `baton prepare` wrote for the model, configures how keys are
selected. Without such a file, the benchmark first fits a key selection itself, with the threshold (alpha) and the
maximum fraction of keys of the InfiniGen paper. The output row `kv_bytes` is the number of bytes of KV that attention
reads in a step. To select keys, the policy also reads some columns of each key; these bytes are not counted.

With `--bars`, the benchmark fails unless a step of `infinigen` is at least 1.6 times as fast as one of `device`.
"""

import argparse
import contextlib
import gzip
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.hosting import use_cores
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.sparse.bases import BasisKind, fit_bases, sample_layers
from baton.modeling.sparse.selection_file import PreparedSelection, prepared_path
from baton.text.tokenizer import Tokenizer
from benchmarks.sides.engine_rows import row_lengths
from benchmarks.support.harness import PAIRS, QUICK_PAIRS, Bars, Pairs, Reporter, case, interleave, make_parser, resolve
from deploy.tuning.selection.passages import Context, Passage, PassageRows, StepScore, prefill, shape_for
from generate_workers.residency.policies import SelectionSource, make_residency

GRID = "16x4096,8x7500"
QUICK_GRID = "2x512"
BAR = 1.6
"""Minimum speedup of a step with residency policy `infinigen` over one with policy `device`, in every case."""
_TEXTS = Path(__file__).parents[1] / "tests" / "data"
_READ, _FITTED = "emma.txt.gz", "persuasion.txt.gz"
_STEPS = 2
_CHARACTERS = 8
"""Upper bound of the mean number of characters per token. To get n tokens of a text, only its first n * _CHARACTERS
characters are tokenized."""
_FITTED_TOKENS = 1024
_COLUMNS = 0.25
"""Fraction of a head's columns (channels) that the approximate scores for key selection use. Applies if this benchmark
fits the selection itself."""
_SELECTION = Selection(alpha=5.0, most_share=0.2, num_first=4, num_last=16)


@dataclass(frozen=True)
class FittedHere(SelectionSource):
    """Key selection that this benchmark fits itself. Used if `baton prepare` has not written one for the model."""

    text: Sequence[int] = ()

    def load(self) -> PreparedSelection:
        """Fit a key selection to the beginning of `text`, and return it. The selection scores keys by only some of the
        columns (channels) of each head: those with the largest queries and keys."""
        decoder, kind = self.decoder, BasisKind.COLUMNS
        num_columns = max(1, int(decoder.config.head_dim * _COLUMNS))
        with torch.inference_mode():
            samples = sample_layers(decoder, self.text[:_FITTED_TOKENS])
            context = decoder.config.max_position
            basis = fit_bases(decoder, samples, [kind], num_columns=num_columns, context=context)[kind]
        return PreparedSelection(basis, _SELECTION, 0, decoder.layout.model_fingerprint, text_hash="")


def text_ids(folder: Path, name: str, num_tokens: int) -> list[int]:
    """Return the ids of the first `num_tokens` tokens of a novel. `name` is the file of the novel."""
    text = gzip.decompress((_TEXTS / name).read_bytes()).decode()
    return Tokenizer.load(folder).encode(text[: _CHARACTERS * num_tokens])[:num_tokens]


def contexts_of(token_ids: Sequence[int], kv: KvBuffer, lengths: Sequence[int], num_steps: int) -> list[Context]:
    """Return one context (a sequence's prefilled text and the tokens that follow it) for each entry of `lengths`, in
    tokens. The following tokens are the inputs of `num_steps` steps. `kv` is the KV of the text."""
    return [Context(Passage(tuple(token_ids[: length + num_steps + 1]), length), kv) for length in lengths]


@contextlib.contextmanager
def running(
    decoder: Decoder, policy: str, contexts: Sequence[Context], source: SelectionSource | None
) -> Iterator[PassageRows]:
    """Context manager. Open one sequence for each context under a residency policy, and yield the sequences. They are
    closed on exit."""
    shape = shape_for(decoder, [context.passage for context in contexts])
    with (
        contextlib.closing(make_residency(policy, shape, decoder.device, source)) as residency,
        PassageRows.opened(decoder, residency, contexts) as rows,
    ):
        yield rows


class Side:
    """Sequences of one residency policy, and the result of their last step."""

    def __init__(self, rows: PassageRows) -> None:
        self._rows = rows
        self.last: StepScore | None = None

    def step_ms(self) -> float:
        """Return the mean milliseconds of `_STEPS` steps, after one warm-up step."""
        self._rows.step()
        scores = [self._rows.step() for _ in range(_STEPS)]
        self.last = scores[-1]
        return statistics.fmean(score.duration_s for score in scores) * 1e3


def compare(
    decoder: Decoder, contexts: Sequence[Context], source: SelectionSource, num_pairs: int
) -> tuple[Pairs, Pairs]:
    """Measure steps of `infinigen` and of `device` alternately. Return two Pairs of (`infinigen`, `device`): the
    milliseconds per step, and the bytes of KV that attention read in the last step."""
    with (
        running(decoder, "infinigen", contexts, source) as sparse,
        running(decoder, "device", contexts, None) as device,
    ):
        ours, theirs = Side(sparse), Side(device)
        pairs = interleave(ours.step_ms, theirs.step_ms, num_pairs)
        assert ours.last is not None and theirs.last is not None
        return pairs, Pairs([float(ours.last.num_kv_bytes)], [float(theirs.last.num_kv_bytes)])


def find_source(decoder: Decoder, folder: Path, path: Path | None) -> SelectionSource:
    """Return the source from which `infinigen` loads its key selection. If `path` is given, the source is this file. If
    `path` is None, the source is the file that `baton prepare` wrote for the model. If that file does not exist, the
    source fits a new key selection when its method `load` is called."""
    console = Console(stderr=True, highlight=False)
    if path is None and not prepared_path(decoder.layout.model_fingerprint).is_file():
        console.print("  nothing was prepared for this model (baton prepare): a basis is fitted here", style="dim")
        return FittedHere(decoder, text=text_ids(folder, _FITTED, _FITTED_TOKENS))
    source = SelectionSource(decoder, path)
    prepared = source.load()
    cost = "not measured" if prepared.perplexity_cost is None else f"{prepared.perplexity_cost:+.2%}"
    columns = f"{prepared.basis.kind.value}, {prepared.basis.num_columns} columns, lookahead {prepared.lookahead}"
    console.print(f"  {columns}; {prepared.selection}; perplexity {cost}", style="dim", soft_wrap=True)
    return source


def run(args: argparse.Namespace) -> int:
    """Measure all cases. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: args.threads or len(cores)]
    use_cores(cores, len(cores))
    folder, num_pairs = resolve(args), args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
    decoder = load_decoder(folder, dtype=args.dtype)
    source = find_source(decoder, folder, args.selection)
    reporter, bars = Reporter("sparse", args.json), Bars()
    num_steps = (num_pairs + 1) * (_STEPS + 1)
    for cell in (args.grid or (QUICK_GRID if args.quick else GRID)).split(","):
        batch, context = map(int, cell.split("x"))
        lengths = row_lengths(batch, context)
        token_ids = text_ids(folder, _READ, max(lengths) + num_steps + 1)
        kv = prefill(decoder, token_ids[: max(lengths)])
        steps, kv_bytes = compare(decoder, contexts_of(token_ids, kv, lengths, num_steps), source, num_pairs)
        name = case(batch=batch, context=context, policy="infinigen", dtype=args.dtype, threads=len(cores))
        reporter.add(name, "step_ms", "ms", "device", steps)
        reporter.add(name, "kv_bytes", "bytes", "device", kv_bytes)
        bars.at_least(f"{cell}, times as fast as device", steps.quartiles(smaller_is_better=True)[1], BAR)
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", default=None, help=f"batch x context cases (default {GRID})")
    parser.add_argument("--threads", type=int, default=0, help="number of compute threads, one core each; 0: all cores")
    parser.add_argument("--selection", type=Path, default=None, help="file of `baton prepare`; default: the model's")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

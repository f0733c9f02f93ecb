"""Implements `baton prepare`: fits bases, compares them, searches for the best selection of keys, and writes it to a
file. A basis projects queries and keys to a few columns, from which the attention scores of the keys are estimated.
Blocks for a minute or more.

1. The model runs over the first passage of the text. Bases of all kinds are fitted to its queries and keys.
2. The model runs over the second passage. Its queries and keys show how much attention each basis captures. The best
   kinds of basis for each number of columns are kept.
3. The model reads the other passages once with each selection that is tried, to measure the perplexity and the bytes of
   KV read. Of the selections whose increase of perplexity is within the allowed limit, the one that reads the fewest
   bytes is written.

If several kinds of bases capture nearly the same attention, they are compared in step 3, because they differ more in
their increase of perplexity.
"""

import argparse
import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from baton.errors import InvalidArgumentError, ModelError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.kv.row_memory import PagedMemory
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis, BasisKind, LayerSample, fit_bases, sample_layers
from baton.modeling.sparse.selection_file import LOOKAHEADS, PreparedSelection, prepared_path, save_prepared
from baton.text.tokenizer import Tokenizer
from deploy.config.environment import use_threads
from deploy.machine.model_folder import resolve_folder
from deploy.machine.this_machine import prepare_kernels
from deploy.options.screen import progress
from deploy.tuning.selection.captured_mass import Captured, Guess, captured
from deploy.tuning.selection.metrics import perplexity, relative_cost
from deploy.tuning.selection.passages import Passage, PassageRows, Reading, prefill_contexts, read, shape_for
from deploy.tuning.selection.selection_tuning import Measured, cheapest, tune
from deploy.tuning.selection.texts import Texts
from deploy.tuning.selection.wanted import Wanted
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import KvShape, Residency
from generate_workers.residency.sparse.infinigen import InfinigenResidency
from generate_workers.residency.sparse.selective import require_selective

_FITTED_TOKENS = 2048
"""Maximum number of tokens to which bases are fitted: the first tokens of the text's first passage. A basis projects
queries and keys to a few columns, from which attention scores are estimated."""
_LEAST_TOKENS = 64
_NUM_JUDGED = 64
"""Number of queries with which bases are compared. A basis projects queries and keys to a few columns, from which
attention scores are estimated. The queries are evenly spaced over the second half of the second passage."""
_JUDGED_SHARE = 0.05
"""Fraction of the keys that are selected by their estimated scores when bases are compared. A basis projects queries
and keys to a few columns, from which attention scores are estimated."""
_TIE = 0.001
"""Difference in captured mass (the fraction of the softmax weight that the selected keys have) below which two bases
count as equal. A basis projects queries and keys to a few columns, from which attention scores are estimated.
Differences of this size also occur when only the number of threads changes."""
_MASS_EVERY = 16
"""Interval, in steps, between measurements of the attention weight that the keys of the final selection have."""


@dataclass(frozen=True)
class Judged:
    """Result of the comparison of one basis with others. A basis projects queries and keys to a few columns, from which
    attention scores are estimated. Keys with high estimated scores are selected. All compared bases select the same
    number of keys."""

    basis: Basis
    own_mass: float
    """Fraction of the softmax weight that the selected keys have if each layer selects keys with its own queries
    (lookahead 0)."""
    early_mass: float
    """Fraction of the softmax weight that the selected keys have if each layer selects keys with queries that were
    predicted one layer earlier (lookahead 1)."""
    is_best: bool
    """True if this basis is one of the best among the compared bases with the same number of columns: its captured mass
    is less than `_TIE` below the highest captured mass of these bases. The captured mass is the field `own_mass` or
    `early_mass`, according to the requested lookahead."""


@dataclass(frozen=True)
class Outcome:
    """Results of `baton prepare`, as it prints them."""

    title: str
    judged: tuple[Judged, ...]
    judged_share: float
    """Fraction of the keys that were selected while bases were compared. It includes the keys at the beginning and at
    the end of the context, which are always selected. A basis projects queries and keys to a few columns, from which
    attention scores are estimated."""
    best_mass: float
    """Fraction of the softmax weight that the selected keys have if they are selected by their true scores, not by
    estimated scores. The number of selected keys is the same as for the compared bases. No basis can select keys with
    more weight."""
    full_perplexity: float
    found: tuple[Measured, ...]
    """Accepted selections of keys, in order of preference. A selection has two bounds: alpha (maximum distance of a
    key's score from the best score) and most_share (maximum fraction of the keys). If the user gave alpha, these are
    the selections with the given bounds, one per basis. Otherwise they are the selections whose increase of perplexity
    is within the allowed limit. The first one is written to the file."""
    path: Path


def prepare(args: argparse.Namespace, wanted: Wanted, console: Console) -> Outcome:
    """Run all stages of `baton prepare`: fit bases, compare them, search for the best selection of keys, and write it
    to a file. A basis projects queries and keys to a few columns, from which attention scores are estimated. Return the
    results. Raises InvalidArgumentError, ConfigError or ModelError."""
    folder = resolve_folder(args.model, args.cache, console)
    prepare_kernels(console)
    torch.set_num_threads(use_threads(args.threads))
    decoder = load_decoder(folder, dtype=args.dtype, weights=args.weights)
    require_fit(decoder, wanted)
    passages = Texts(Tokenizer.load(folder), [args.text], wanted.num_rows).passages(wanted.context, wanted.num_steps)
    fitted = passages[0].token_ids[: min(wanted.context, _FITTED_TOKENS)]
    judging = passages[1].token_ids[: wanted.context]
    bases = fit(decoder, fitted, wanted, console)
    judged, oracle = judge(decoder, judging, bases, wanted, console)
    reader = PassageReader(decoder, passages[2:], wanted.lookahead, console)
    found = select([each.basis for each in judged if each.is_best], wanted, reader)
    reading = reader.read(found[0].basis, found[0].selection, _MASS_EVERY)
    prepared = PreparedSelection(
        basis=found[0].basis,
        selection=found[0].selection,
        lookahead=wanted.lookahead,
        fingerprint=decoder.layout.model_fingerprint,
        text_hash=hashlib.blake2b(repr(fitted).encode(), digest_size=8).hexdigest(),
        captured_mass=reading.mass,
        picked_share=reading.picked_share,
        perplexity_cost=found[0].cost,
    )
    path = args.output or prepared_path(prepared.fingerprint, prepared.lookahead)
    save_prepared(prepared, path)
    weights = "" if args.weights == "stored" else f", {args.weights} weights"
    title = f"{args.model}, {args.dtype}{weights}; {wanted.num_rows} passages of {args.text.name}"
    return Outcome(title, judged, oracle.share, oracle.mass, reader.full_perplexity, tuple(found), path)


@torch.inference_mode()
def fit(decoder: Decoder, token_ids: Sequence[int], wanted: Wanted, console: Console) -> list[Basis]:
    """Return one basis of each requested kind, fitted to the text `token_ids`. A basis projects queries and keys to a
    few columns, from which attention scores are estimated. Each returned basis has the largest requested number of
    columns."""
    kinds = [BasisKind(name) for name in wanted.kinds]
    num_columns = _num_columns(decoder, wanted)[-1]
    context = wanted.reach or decoder.config.max_position
    with progress(console, "fitting bases", _num_sampled(decoder)) as done:
        samples = _counted(sample_layers(decoder, token_ids), done)
        return list(fit_bases(decoder, samples, kinds, num_columns=num_columns, context=context).values())


@torch.inference_mode()
def judge(
    decoder: Decoder, token_ids: Sequence[int], bases: Sequence[Basis], wanted: Wanted, console: Console
) -> tuple[tuple[Judged, ...], Captured]:
    """Compare bases on the text `token_ids`. A basis projects queries and keys to a few columns, from which attention
    scores are estimated. Return a pair: the result for each basis with each number of columns, and the best possible
    result, for which keys are selected by their true scores."""
    selection = Selection(math.inf, _JUDGED_SHARE, wanted.num_first, wanted.num_last)
    narrowed = [basis.first(num) for num in _num_columns(decoder, wanted) for basis in bases]
    guesses = [Guess(basis, lookahead, selection) for basis in narrowed for lookahead in LOOKAHEADS]
    positions_Q = torch.linspace(len(token_ids) // 2, len(token_ids) - 1, _NUM_JUDGED).long()
    with progress(console, "judging bases", _num_sampled(decoder)) as done:
        samples = _counted(sample_layers(decoder, token_ids), done)
        guessed = [Guess(None, 0, selection), *guesses]
        oracle, *found = captured(samples, guessed, positions_Q, decoder.config.windows)
    masses = [(own.mass, early.mass) for own, early in zip(found[::2], found[1::2], strict=True)]
    best: dict[int, float] = {}
    for basis, mass in zip(narrowed, masses, strict=True):
        best[basis.num_columns] = max(best.get(basis.num_columns, 0.0), mass[wanted.lookahead])
    judged = [
        Judged(basis, *mass, is_best=mass[wanted.lookahead] > best[basis.num_columns] - _TIE)
        for basis, mass in zip(narrowed, masses, strict=True)
    ]
    return tuple(judged), oracle


def select(bases: Sequence[Basis], wanted: Wanted, reader: "PassageReader") -> list[Measured]:
    """Measure selections of keys with these bases, and return the selections in order of preference. A basis projects
    queries and keys to a few columns, from which attention scores are estimated. A selection has two bounds: alpha
    (maximum distance of a key's score from the best score) and most_share (maximum fraction of the keys). If the user
    gave alpha, a selection with this alpha, and with the given or the default most_share, is measured for each basis,
    and the one that increases perplexity least is first. Otherwise both bounds are searched for. Of the selections
    whose increase of perplexity is within the allowed limit, the one that reads the fewest bytes is first. Raises
    ConfigError."""
    if wanted.by_hand is None:
        fixed = Selection(math.inf, 1.0, wanted.num_first, wanted.num_last, wanted.free_keys)
        bases = cheapest(bases, fixed, wanted.context, reader.measure)
        return tune(bases, fixed, wanted.context, wanted.most_cost, reader.measure)
    selection = Selection(*wanted.by_hand, wanted.num_first, wanted.num_last, wanted.free_keys)
    return sorted((reader.measure(basis, selection) for basis in bases), key=lambda each: each.cost)


class PassageReader:
    """Measures the perplexity of the same passages of text with several selections of keys, one after another."""

    def __init__(self, decoder: Decoder, passages: Sequence[Passage], lookahead: int, console: Console) -> None:
        """Prefill the contexts of the passages, and read the passages once with attention to all keys, as the
        reference. `lookahead` is 0 if a layer selects keys with its own queries, and 1 if it selects them with queries
        that were predicted one layer earlier. Raises ConfigError if there is not enough memory."""
        self._decoder = decoder
        self._lookahead = lookahead
        self._console = console
        self._shape = shape_for(decoder, passages)
        self._contexts = prefill_contexts(decoder, passages, console)
        self._full = self._read(DeviceResidency(self._shape, PagedMemory), "all keys", 0)
        self._measured: dict[tuple[str, Selection], Measured] = {}

    @property
    def full_perplexity(self) -> float:
        """Perplexity of the passages with attention to all keys."""
        return perplexity(self._full.losses_BM)

    def read(self, basis: Basis, selection: Selection, mass_every: int = 0) -> Reading:
        """Run the model over the passages with the policy `infinigen`, this basis and this selection. Every
        `mass_every` steps, the true attention weight of the selected keys is measured, which is slow. If `mass_every`
        is 0, it is never measured."""
        fingerprint = self._shape.layout.model_fingerprint
        prepared = PreparedSelection(basis, selection, self._lookahead, fingerprint, text_hash="")
        residency = InfinigenResidency(self._shape, PagedMemory, prepared, self._decoder)
        return self._read(residency, _name(basis, selection), mass_every)

    def measure(self, basis: Basis, selection: Selection) -> Measured:
        """Run the model over the passages with this basis and this selection of keys. Return the increase of perplexity
        and the bytes read. A repeated call with the same basis and selection returns the first result. Implements
        `selection_tuning.Measure`."""
        key = f"{basis.kind.value} {basis.num_columns}", selection
        if key not in self._measured:
            self._measured[key] = self._measure(basis, selection)
        return self._measured[key]

    def _measure(self, basis: Basis, selection: Selection) -> Measured:
        reading = self.read(basis, selection)
        cost, cost_error = relative_cost(reading.losses_BM, self._full.losses_BM)
        layout = self._shape.layout
        # in addition to KV, a bf16 partial key is read for each key in the layers that choose
        choosing_share = (layout.num_layers - NUM_WHOLE_LAYERS) / layout.num_layers
        partial_share = choosing_share * 2 * layout.num_kv_heads * basis.num_columns / layout.row_bytes
        measured = Measured(
            basis,
            selection,
            cost=cost,
            cost_error=cost_error,
            picked_share=reading.picked_share or 0.0,
            read_share=reading.num_kv_bytes / reading.num_full_bytes + partial_share,
        )
        line = f"  {_name(basis, selection)}: reads {measured.read_share:.1%}, perplexity {cost:+.2%}"
        self._console.print(line, style="dim", soft_wrap=True)
        return measured

    def _read(self, residency: Residency, name: str, mass_every: int) -> Reading:
        with (
            contextlib.closing(residency),
            PassageRows.opened(self._decoder, residency, self._contexts) as rows,
            progress(self._console, name, rows.num_steps_left) as done,
        ):
            return read(rows, mass_every, lambda: done(1))


def require_fit(decoder: Decoder, wanted: Wanted) -> None:
    """Check the model and the options for errors that would otherwise appear only after minutes of work. Raises
    InvalidArgumentError, ConfigError or ModelError."""
    config = decoder.config
    if config.num_layers <= NUM_WHOLE_LAYERS:
        raise ModelError(
            f"the model has {config.num_layers} layers, and the first {NUM_WHOLE_LAYERS} attend to all keys: there is"
            " nothing to choose; use residency device"
        )
    if wanted.context < _LEAST_TOKENS:
        raise InvalidArgumentError(f"--context {wanted.context} is too short to fit to: use at least {_LEAST_TOKENS}")
    needed = wanted.context + wanted.num_steps + 1
    if needed > config.max_position:
        raise InvalidArgumentError(
            f"--context {wanted.context} and --steps {wanted.num_steps} are beyond the {config.max_position} tokens"
            " that the model takes: shorten one of them"
        )
    fitted = min(wanted.context, _FITTED_TOKENS)
    if wanted.reach and not fitted <= wanted.reach <= config.max_position:
        raise InvalidArgumentError(
            f"--reach {wanted.reach} is out of range: use at least the {fitted} tokens that bases are fitted to, and at"
            f" most the {config.max_position} that the model takes"
        )
    require_selective("residency = 'infinigen'", KvShape(decoder.layout, config.windows, 1, needed), decoder.device)


def _name(basis: Basis, selection: Selection) -> str:
    return f"{basis.kind.value} {basis.num_columns}, alpha {selection.alpha:g}, most {selection.most_share:.0%}"


def _num_columns(decoder: Decoder, wanted: Wanted) -> list[int]:
    """Return the numbers of columns that correspond to the ratios, ascending and without duplicates."""
    return sorted({max(1, round(ratio * decoder.config.head_dim)) for ratio in wanted.ratios})


def _num_sampled(decoder: Decoder) -> int:
    return decoder.config.num_layers - NUM_WHOLE_LAYERS


def _counted(samples: Iterable[LayerSample], done: Callable[[int], None]) -> Iterator[LayerSample]:
    """Yield the samples, and call `done` after each one when the next one is requested."""
    for sample in samples:
        yield sample
        done(1)

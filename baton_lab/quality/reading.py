"""Runs all settings (residency policies with parameters) of `baton evaluate` on the same passages, in this process.
Blocks for minutes."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from baton.errors import ConfigError, InvalidArgumentError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.copying import LinkRate
from baton.modeling.device.making import make_device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.text.tokenizer import Tokenizer
from baton_lab.comparators.residencies import BudgetSource, make_residency
from baton_lab.quality.evaluation import Cell, Evaluation, Setting, Size
from baton_lab.quality.needles import NeedleTexts
from deploy.config.environment import use_threads
from deploy.machine.model_folder import resolve_folder
from deploy.machine.this_machine import inspect_machine, prepare_kernels
from deploy.options.screen import progress
from deploy.tuning.selection.metrics import compatibility, perplexity, relative_cost
from deploy.tuning.selection.passages import Context, PassageRows, Reading, prefill_contexts, read, shape_for
from generate_workers.residency.port import KvShape, Residency
from generate_workers.residency.sparse.pool import Eviction, PoolSize

_FULL = Setting("device")
"""Setting with full attention. All other settings are compared with it."""
_NUM_CHUNKS = 8
"""Number of consecutive groups into which the steps are divided. A perplexity is reported for each group."""
_NEEDLE_TOKENS = 64
"""Maximum number of tokens of a needle (a fact hidden in a passage), its question and its answer together."""


@dataclass(frozen=True)
class VariedSource(BudgetSource):
    """Inputs of policies that select keys, with parameters that replace those in the model's selection file. `budget`
    fixes the fraction of keys to select, regardless of their scores. `alpha` replaces the maximum distance of a key's
    score from the best score; the keys within this distance are counted to determine how many keys are selected. None:
    the value in the file."""

    alpha: float | None = None

    def load(self) -> PreparedSelection:
        """Load the selection file that `baton prepare` wrote, and apply `budget` and `alpha` to its parameters. Raises
        ModelError if the file does not exist or is not valid for the model."""
        prepared = super().load()
        selection = prepared.selection
        if self.budget is not None:
            selection = dataclasses.replace(selection, alpha=math.inf, most_share=self.budget, free_keys=1)
        if self.alpha is not None:
            selection = dataclasses.replace(selection, alpha=self.alpha)
        return dataclasses.replace(prepared, selection=selection)


@dataclass(frozen=True)
class Material:
    """Texts of one context length."""

    plain: list[Context]
    facts: list[Context]
    """Passages with needles (hidden facts); empty if the needle test was not requested."""
    answers: list[int]
    """Number of tokens of the answer to each needle, in the order of `facts`."""


@dataclass(frozen=True)
class Readings:
    """Results of one setting for all texts of one context length."""

    plain: Reading
    is_exact: bool
    num_found: int | None


def evaluate(
    args: argparse.Namespace, size: Size, settings: Sequence[Setting], console: Console, bytes_per_s: float = math.inf
) -> Evaluation:
    """Run all settings (residency policies with parameters) on all texts, and return the results. `bytes_per_s`:
    bandwidth of an emulated device's link. Raises InvalidArgumentError, ConfigError or ModelError."""
    folder = resolve_folder(args.model, args.cache, console)
    prepare_kernels(console)
    num_threads = use_threads(args.threads)
    torch.set_num_threads(num_threads)
    decoder = load_decoder(folder, dtype=args.dtype, weights=args.weights)
    reader = decoder  # contexts are prefilled on the CPU, for any device
    if args.device != "cpu":
        device = make_device(args.device, LinkRate(bytes_per_s))
        reader = Decoder(decoder.config, decoder.weights, device=device)
    _check(reader, size, settings)
    texts = NeedleTexts(Tokenizer.load(folder), args.text, size.num_rows)
    cells = []
    for context in size.contexts:
        material = gather(decoder, texts, context, size, console)
        full = read_all(reader, _FULL, material, size, console)
        for setting in settings:
            found = full if setting == _FULL else read_all(reader, setting, material, size, console)
            cells.append(_cell(context, setting, found, full.plain))
            line = f"  {context} {setting}: perplexity {cells[-1].perplexity:.2f}, {cells[-1].cost:+.2%}"
            console.print(line, style="dim", soft_wrap=True)
    weights = "" if args.weights == "stored" else f", {args.weights} weights"
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    names = ", ".join(path.name for path in args.text)
    where = "" if args.device == "cpu" else f", device {args.device}"
    read = f"{size.num_rows} rows of {names}, {size.num_steps} steps"
    title = f"{args.model}, {args.dtype}{weights}, {threads}{where}; {read}"
    return Evaluation(title, size.num_rows, size.num_steps, tuple(cells))


def gather(decoder: Decoder, texts: NeedleTexts, context: int, size: Size, console: Console) -> Material:
    """Prefill all passages of one context length, and return the results with the lengths of the needles' answers.
    Raises InvalidArgumentError if the texts are too short, and ConfigError if there is not enough memory."""
    passages = texts.passages(context, size.num_steps)
    needles = texts.needles(context, size.num_steps) if size.has_needles else []
    wanted = [*passages, *(needle.passage for needle in needles)]
    made = prefill_contexts(decoder, wanted, console)
    return Material(made[: len(passages)], made[len(passages) :], [needle.num_answer for needle in needles])


def read_all(decoder: Decoder, setting: Setting, material: Material, size: Size, console: Console) -> Readings:
    """Run a setting (residency policy with parameters) on the texts `material`, and return its results. The plain
    passages are one batch, and the passages with needles (hidden facts) are another batch."""
    plain, is_exact = _read(decoder, setting, material.plain, size.mass_every, console)
    if not material.facts:
        return Readings(plain, is_exact, None)
    facts, _ = _read(decoder, setting, material.facts, 0, console)
    return Readings(plain, is_exact, num_found(facts.choices_BM, material))


def num_found(choices_BM: Tensor, material: Material) -> int:
    """Return the number of needles whose whole answer was predicted. `choices_BM`: most likely token, by passage (B)
    and step (M)."""
    answers = zip(choices_BM.tolist(), material.facts, material.answers, strict=True)
    return sum(choices[-length:] == list(fact.passage.token_ids[-length:]) for choices, fact, length in answers)


def _read(
    decoder: Decoder, setting: Setting, contexts: Sequence[Context], mass_every: int, console: Console
) -> tuple[Reading, bool]:
    """Run the contexts through one policy. Return the results, and whether the policy is exact."""
    shape = shape_for(decoder, [context.passage for context in contexts])
    with (
        closing(_residency(decoder, setting, shape)) as residency,
        PassageRows.opened(decoder, residency, contexts) as rows,
        progress(console, str(setting), rows.num_steps_left) as done,
    ):
        return read(rows, mass_every, lambda: done(1)), residency.traits.is_exact


def _residency(decoder: Decoder, setting: Setting, shape: KvShape) -> Residency:
    pool = None
    if setting.pool is not None:
        assert setting.eviction is not None
        pool = PoolSize(int(setting.pool * shape.max_slot_tokens), Eviction(setting.eviction))
    source = VariedSource(decoder, setting.selection, pool, budget=setting.budget, alpha=setting.alpha)
    return make_residency(setting.policy, shape, decoder.device, source)


def _cell(context: int, setting: Setting, found: Readings, full: Reading) -> Cell:
    reading = found.plain
    cost, cost_error = relative_cost(reading.losses_BM, full.losses_BM)
    chunks = perplexities(reading.losses_BM, max(reading.losses_BM.shape[1] // _NUM_CHUNKS, 1))
    return Cell(
        context=context,
        policy=setting.policy,
        setting=str(setting),
        budget=setting.budget,
        alpha=setting.alpha,
        selection=None if setting.selection is None else setting.selection.stem,
        pool=setting.pool,
        eviction=setting.eviction,
        is_exact=found.is_exact,
        perplexity=perplexity(reading.losses_BM),
        cost=cost,
        cost_error=None if math.isnan(cost_error) else cost_error,
        same_choice=compatibility(reading.choices_BM, full.choices_BM),
        picked_share=reading.picked_share,
        kv_share=reading.num_kv_bytes / reading.num_full_bytes,
        link_share=reading.num_link_bytes / reading.num_full_bytes,
        home_share=reading.held.home / full.held.home,
        device_share=reading.held.device / full.held.home,
        mass=reading.mass,
        num_found=found.num_found,
        step_ms=1e3 * reading.step_s,
        chunks=tuple(chunks),
    )


def _check(decoder: Decoder, size: Size, settings: Sequence[Setting]) -> None:
    """Raise InvalidArgumentError, ConfigError or ModelError for settings that would fail only after minutes."""
    needed, limit = size.contexts[-1] + size.num_steps + 1, decoder.config.max_position
    needed += _NEEDLE_TOKENS if size.has_needles else 0
    if needed > limit:
        raise InvalidArgumentError(
            f"--context {size.contexts[-1]} and --steps {size.num_steps} are beyond the {limit} tokens that the model"
            " takes: shorten one of them"
        )
    shortest = size.contexts[0] + size.num_steps + 1  # a pool's size is a fraction of it
    for setting, num_tokens in itertools.product(settings, {shortest, needed}):
        _residency(decoder, setting, KvShape(decoder.layout, decoder.config.windows, 1, num_tokens)).close()
    copies = 4 if size.has_needles else 2  # contexts, and the sequences that are made from them
    kv_bytes = copies * size.num_rows * needed * decoder.layout.token_bytes
    if kv_bytes > (available := inspect_machine().available_bytes):
        needs, has = f"{kv_bytes / 1e9:.1f} GB", f"{available / 1e9:.1f} GB"
        raise ConfigError(f"KV of {size.num_rows} rows takes {needs}, and {has} are free: use fewer --rows")


def perplexities(losses_BM: Tensor, chunk_steps: int) -> list[float]:
    """Return the perplexity of each consecutive chunk of `chunk_steps` steps, over all sequences. Steps after the last
    whole chunk are left out."""
    num_chunks = losses_BM.shape[1] // chunk_steps
    return [perplexity(losses_BM.narrow(1, chunk * chunk_steps, chunk_steps)) for chunk in range(num_chunks)]

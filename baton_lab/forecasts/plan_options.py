"""Finds the model and the hardware that the options of `baton plan` name."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton.planning.chips import Chip
from baton.planning.model_shape import ModelShape
from baton.types import DTYPE_BYTES
from baton_lab.study.known_hardware import HERE, chip_of
from baton_lab.study.known_models import SHAPES, TIED, shape_from
from baton_lab.study.roofline import Mixture, ServedModel, served
from deploy.options import numbers as option_values

DEFAULT_CHIP = "h100"


@dataclass(frozen=True)
class NamedModel:
    """Model that the options name, with the number formats of its weights and KV."""

    name: str
    formats: str
    """Number formats of weights and KV, as text for people."""
    model: ServedModel
    shape: ModelShape | None
    """Shape of the model; None if the options give only its size."""


def find_model(args: argparse.Namespace) -> NamedModel:
    """Return the model that the options name. Exactly one option must name it. Raises InvalidArgumentError, ConfigError
    or ModelError if the options are invalid or the model cannot be read."""
    ways = {"MODEL": args.model, "--shape": args.shape, "--params": args.params}
    given = [name for name, value in ways.items() if value]
    if len(given) != 1:
        remedy = "give one of MODEL (a name or a folder), --shape, or --params with --kv-per-token"
        raise InvalidArgumentError(f"{' and '.join(given) or 'no model'} given: {remedy}")
    if (args.params is None) != (args.kv_per_token is None):
        raise InvalidArgumentError("--params and --kv-per-token describe a model together: give both")
    if args.params:
        return _sized(args)
    return _shaped(args) if args.shape else _named(args)


def find_chip(args: argparse.Namespace, shape: ModelShape | None) -> tuple[str, Chip]:
    """Return the name and the rates of the hardware that the options name. With `--hardware here`, measure this
    machine. Raises InvalidArgumentError or ConfigError if the hardware is unknown or cannot be measured."""
    name = (args.hardware or DEFAULT_CHIP).lower()
    if name == HERE:
        return _measured(args, shape)
    if args.threads is not None:
        raise InvalidArgumentError("--threads applies to this machine only: add --hardware here, or leave it out")
    chip = chip_of(name)
    if args.dtype != "bfloat16":
        raise InvalidArgumentError(
            f"--dtype = {args.dtype!r}: {name} is known by its bfloat16 rate only: use bfloat16, or measure"
            " with --hardware here"
        )
    return name, chip


def _measured(args: argparse.Namespace, shape: ModelShape | None) -> tuple[str, Chip]:
    if shape is None:
        raise InvalidArgumentError("--hardware here measures with the model's matrices: give MODEL or --shape")
    from rich.console import Console

    from deploy.config.environment import use_threads
    from deploy.machine.probe import measure
    from deploy.machine.this_machine import inspect_machine

    threads = use_threads(0) if args.threads is None else option_values.count("--threads", args.threads, 4096)
    console = Console(stderr=True)
    with console.status("measuring this machine"):
        memory_bytes = inspect_machine().available_bytes
        measured = measure(shape, args.dtype, threads, memory_bytes, weights=args.weights or "stored")
    if measured.doubt:
        console.print(f"baton: {measured.doubt}", soft_wrap=True)
    return f"this machine, measured with {threads} thread{'s' if threads > 1 else ''}", measured.chip


def _sized(args: argparse.Namespace) -> NamedModel:
    model = ServedModel(
        num_params=option_values.positive("--params", args.params),
        kv_token_bytes=option_values.positive("--kv-per-token", args.kv_per_token),
        weight_bytes=_bytes(args, "weights"),
    )
    return NamedModel(f"{model.num_params / 1e9:g}e9 parameters", f"{args.weights or args.dtype} weights", model, None)


def _shaped(args: argparse.Namespace) -> NamedModel:
    fields = option_values.assignments("--shape", args.shape)
    tied = bool(fields.pop("tied", 0))
    mixture = Mixture(fields.pop("experts", 1), fields.pop("active_experts", 1))
    shape = shape_from({**fields, "dtype_bytes": DTYPE_BYTES[args.dtype]}, "--shape")
    return _serve(args, "a model", shape, tied=tied, mixture=mixture)


def _named(args: argparse.Namespace) -> NamedModel:
    if args.model in SHAPES:
        shape = replace(SHAPES[args.model], dtype_bytes=DTYPE_BYTES[args.dtype])
        return _serve(args, args.model, shape, tied=args.model in TIED)
    from deploy.machine.hub import is_hub_name

    if not Path(args.model).expanduser().exists() and not is_hub_name(args.model):
        remedy = f"give a folder with config.json, a .gguf file, a name on a hub, or one of {', '.join(SHAPES)}"
        raise InvalidArgumentError(f"MODEL = {args.model!r} neither exists nor is known: {remedy}")
    from rich.console import Console

    from baton.modeling.checkpoints.weights import load_config
    from baton.settings.paths import cache_folder
    from deploy.machine.model_folder import resolve_folder
    from deploy.machine.resolved_model import ResolvedModel

    folder = resolve_folder(args.model, cache_folder(), Console(stderr=True), weights=False)
    config, shape = load_config(folder), ResolvedModel(folder).shape(args.dtype)
    name = args.model if is_hub_name(args.model) else folder.name or str(folder)
    named = _serve(args, name, shape, tied=config.tie_embeddings)
    return replace(named, model=replace(named.model, windows=config.windows))


def _serve(
    args: argparse.Namespace, name: str, shape: ModelShape, *, tied: bool, mixture: Mixture | None = None
) -> NamedModel:
    model = served(shape, tied=tied, weight_bytes=_bytes(args, "weights"), kv_bytes=_bytes(args, "kv"), mixture=mixture)
    formats = f"{args.weights or args.dtype} weights, {args.kv or args.dtype} KV"
    return NamedModel(name, formats, model, shape)


def _bytes(args: argparse.Namespace, what: str) -> int:
    """Return the number of bytes per element: 1 for int8, else that of the dtype."""
    return 1 if getattr(args, what) else DTYPE_BYTES[args.dtype]

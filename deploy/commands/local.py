"""Implements the command line of `baton local`, which runs one prompt through a cluster in one process tree
(`deploy.commands.session`)."""

import argparse
import json
from typing import Any

from baton.errors import InvalidArgumentError
from baton.sampling_params import params_from_options
from baton.types import DTYPES, QUANTIZATIONS
from deploy.commands.inspection import add_config_options
from deploy.options.prompt import add_prompt, add_sampling, read_prompt, sampling_options

_FIELDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "model": ("model.name", "Hugging Face folder, GGUF file, or name", {}),
    "cache": ("model.cache", "folder for converted models", {}),
    "ranks": ("prefill.num_ranks", "prefill ranks in the chain", {"type": int}),
    "dtype": ("model.dtype", "of weights, activations and KV", {"choices": DTYPES}),
    "quantization": ("model.quantization", "of weights, on top of the dtype", {"choices": QUANTIZATIONS}),
    "threads": ("generate.num_threads", "torch threads of generation; 0 for all cores", {"type": int}),
}
"""Options that each set one field of the configuration. A key is the option's name. A value is a tuple: the field, the
help text, and further arguments of `add_argument`."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `local` command to the command line."""
    parser = commands.add_parser(
        "local",
        help="run one prompt through prefill ranks and a generation engine on this machine, without Ray",
        description="Starts the prefill ranks and the generation engine as processes of one tree, streams the answer "
        "to standard output and draws the request's timeline on standard error. Configured as `baton serve` is, but "
        "orchestrator.disaggregation is always unless it is set.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_prompt(parser)
    for option, (field, text, kind) in _FIELDS.items():
        parser.add_argument(f"--{option}", default=argparse.SUPPRESS, help=f"{text}: {field}", **kind)
    parser.add_argument("--colocated", action="store_true", help="no prefill ranks: the generation engine does it all")
    add_config_options(parser)
    parser.add_argument("--no-timeline", action="store_true", help="print the answer only")
    add_sampling(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `baton local`; return the exit status."""
    params = params_from_options(sampling_options(args))
    if getattr(args, "ranks", 1) < 1:
        raise InvalidArgumentError(f"--ranks {args.ranks} is out of range: use at least 1, or --colocated")
    options = [
        f"{_FIELDS[name][0]}={json.dumps(value, ensure_ascii=False)}"
        for name, value in vars(args).items()
        if name in _FIELDS
    ]
    options += ["prefill.num_groups=0"] if args.colocated else []
    prompt = read_prompt(args.prompt)
    # Imported here, because it imports torch: --help and mistyped options are answered at once.
    from deploy.commands.session import run_session
    from deploy.config.file import read_config

    config = read_config(args.config, [*options, *args.set]).local.config
    return run_session(config, prompt, params, args)

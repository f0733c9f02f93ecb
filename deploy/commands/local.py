"""Implements the command line of `baton local`, which runs one prompt through a cluster in one process tree
(`deploy.commands.session`)."""

import argparse
import json
from typing import Any

from baton.errors import InvalidArgumentError
from baton.sampling_params import params_from_options
from baton.types import DTYPES, WEIGHT_FORMS
from deploy.commands.inspection import add_config_options
from deploy.options.prompt import add_prompt, add_sampling, read_prompt, sampling_options
from deploy.options.subcommand import DefaultsFormatter

_FIELDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "model": ("model.name", "model: name, Hugging Face folder, or GGUF file", {}),
    "cache": ("model.cache", "folder for converted models", {}),
    "ranks": ("prefill.num_ranks", "number of prefill ranks in the chain", {"type": int}),
    "dtype": ("model.dtype", "data type of weights, activations and KV", {"choices": DTYPES}),
    "weights": ("model.weights", "form of weights in memory", {"choices": WEIGHT_FORMS}),
    "threads": ("generate.num_threads", "number of threads of the engine; 0: one for each core", {"type": int}),
}
"""Options that each set one field of the configuration. A key is the option's name. A value is a tuple: the field, the
help text, and further arguments of `add_argument`."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `local` command to the command line."""
    parser = commands.add_parser(
        "local",
        help="run one prompt on prefill ranks and a generation engine of this machine, without Ray",
        description="Starts prefill ranks and a generation engine as child processes, and runs one prompt on them. "
        "Writes the answer to standard output while it is generated, and then a timeline of the request to standard "
        "error. The settings are those of `baton serve`, except that the default of orchestrator.disaggregation is "
        "`always`: prefill ranks compute every prompt.",
        formatter_class=DefaultsFormatter,
    )
    add_prompt(parser)
    for option, (field, text, kind) in _FIELDS.items():
        parser.add_argument(f"--{option}", default=argparse.SUPPRESS, help=f"{text} (setting {field})", **kind)
    text = "start no prefill ranks; the generation engine also computes the prompt"
    parser.add_argument("--colocated", action="store_true", help=text)
    add_config_options(parser)
    parser.add_argument("--no-timeline", action="store_true", help="do not draw the timeline")
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

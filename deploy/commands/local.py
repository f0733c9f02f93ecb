"""`baton local`: runs one prompt through a relay in one process tree (deploy.commands.session). Its command line."""

import argparse
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton.sampling_params import params_from_options
from baton.settings.paths import cache_folder
from baton.types import DTYPES, QUANTIZATIONS
from deploy.config.environment import DEFAULT_MODEL
from deploy.options.prompt import add_prompt, add_sampling, read_prompt, sampling_options


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `local` command to the command line."""
    parser = commands.add_parser(
        "local",
        help="run one prompt through prefill ranks and a generation engine on this machine, without Ray",
        description="Starts the prefill ranks and the generation engine as processes of one tree, streams the answer "
        "to standard output and draws the request's timeline on standard error.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_prompt(parser)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hugging Face folder, GGUF file, or known name")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder for converted models")
    parser.add_argument("--ranks", type=int, default=2, help="prefill ranks in the chain")
    parser.add_argument("--colocated", action="store_true", help="no prefill ranks: the generation engine does it all")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights, activations and KV")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none", help="of weights, on top of the dtype")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of generation; 0 for all cores")
    parser.add_argument("--no-timeline", action="store_true", help="print the answer only")
    add_sampling(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `baton local`; return the exit status."""
    params = params_from_options(sampling_options(args))
    if args.ranks < 1:
        raise InvalidArgumentError(f"--ranks {args.ranks} is out of range: use at least 1, or --colocated")
    prompt = read_prompt(args.prompt)
    # Imported here, because it imports torch: --help and mistyped options are answered at once.
    from deploy.commands.session import run_session

    return run_session(args, prompt, params)

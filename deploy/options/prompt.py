"""Options and input of the commands that take a prompt."""

import argparse
import sys

from baton.errors import InvalidArgumentError
from baton.limits import MAX_PROMPT_BYTES
from baton.sampling_params import SamplingOptions


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the prompt argument and the option --chat to a command's parser."""
    parser.add_argument("prompt", help="text of the prompt; -: read the prompt from standard input")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message of the user")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options to a command's parser. `sampling_options` reads them from the parsed arguments."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=128, help="maximum number of output tokens")
    text = "sampling temperature; 0: greedy (default: %(default)g)"
    group.add_argument("--temperature", type=float, default=0.0, help=text)
    text = "number of most likely tokens to sample from; 0: all tokens (default: %(default)s)"
    group.add_argument("--top-k", type=int, default=0, help=text)
    text = "total probability of the most likely tokens to sample from; 1: all tokens"
    group.add_argument("--top-p", type=float, default=1.0, help=text)
    text = "minimum probability of a token to sample, as a fraction of the highest probability (default: %(default)g)"
    group.add_argument("--min-p", type=float, default=0.0, help=text)
    group.add_argument(
        "--seed",
        type=int,
        default=argparse.SUPPRESS,
        help="seed of sampling; equal prompts, parameters and seeds give equal text (default: 0 for `baton local`, "
        "random for `baton generate`)",
    )
    group.add_argument("--stop", action="append", default=[], help="string that ends the answer; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="do not end the answer at end-of-sequence tokens")


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """Return the sampling parameters that were given as command-line options. They have a seed only if the user gave
    one."""
    options: SamplingOptions = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "stop": tuple(args.stop),
        "ignore_eos": args.ignore_eos,
    }
    if "seed" in args:
        options["seed"] = args.seed
    return options


def read_prompt(argument: str) -> str:
    """Return the prompt. If `argument` is `-`, the prompt is read from standard input, which blocks. Otherwise
    `argument` is the prompt. Raises InvalidArgumentError for a prompt that is empty, too long, or not UTF-8."""
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1) if argument == "-" else argument.encode(errors="surrogateescape")
    if len(data) > MAX_PROMPT_BYTES:
        raise InvalidArgumentError(f"prompt is longer than {MAX_PROMPT_BYTES} bytes: send less text")
    try:
        prompt = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"prompt is not UTF-8 (byte {error.start}): re-encode it") from error
    if not prompt:
        raise InvalidArgumentError("prompt is empty: give at least one character")
    return prompt

"""Options of `baton bench`; `baton_lab.bench.parsed` reads them. Imports little: they are made for each command."""

import argparse
from pathlib import Path

MAX_REQUESTS = 10_000_000
MAX_USERS = 100_000
SECONDS = 60.0
"""Length of a load where options bound neither its time nor its requests."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the server and how requests are sent to it."""
    group = parser.add_argument_group("server")
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", metavar="URL", help="server that speaks OpenAI's API, like http://127.0.0.1:8000")
    where.add_argument("--address", metavar="HOST:PORT", help="Baton server to call over gRPC, like 127.0.0.1:50051")
    text = "send prompts, or chats, whose template the server adds (default: %(default)s)"
    group.add_argument("--api", choices=("completions", "chat"), default="completions", help=text)
    group.add_argument("--model", metavar="NAME", help="model, with --url (default: the first that the server lists)")
    text = "environment variable with the API key, for a server that requires one"
    group.add_argument("--api-key-env", metavar="VARIABLE", help=text)
    text = "seconds after which a request counts as failed (default: %(default)s)"
    group.add_argument("--timeout", default="600", metavar="S", help=text)
    group.add_argument("--temperature", default="0", metavar="T", help="0 is greedy (default: %(default)s)")
    text = "let answers end where the model ends them, and send no ignore_eos, which OpenAI's own servers refuse"
    group.add_argument("--allow-eos", action="store_true", help=text)
    group.add_argument("--extra-body", metavar="JSON", help="object of further fields for each request, with --url")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that define the arrivals of each load."""
    group = parser.add_argument_group("load (one of --rate, --concurrency, --trace)")
    text = "open loop: requests, or conversations, that begin a second; several are a sweep"
    group.add_argument("--rate", metavar="R,...", help=text)
    text = "shape of the gamma distribution of the gaps: 1 is Poisson, less comes in bursts (default: %(default)s)"
    group.add_argument("--burstiness", default="1", metavar="B", help=text)
    text = "closed loop: users who each send a request once the last was answered; several are a sweep"
    group.add_argument("--concurrency", metavar="N,...", help=text)
    text = "replay a file of Mooncake's, Azure's or BurstGPT's format, at its own rate or at that of --rate"
    group.add_argument("--trace", type=Path, metavar="FILE", help=text)
    text = (
        f"seconds in which requests begin, for each load (default: {SECONDS:g}, unless --requests or --trace ends it)"
    )
    group.add_argument("--seconds", metavar="S", help=text)
    group.add_argument("--requests", metavar="N", help="maximum number of requests, or conversations, of each load")
    text = "seed of arrivals, lengths and prompts (default: drawn and printed, so that no prompt is cached)"
    group.add_argument("--seed", metavar="N", help=text)


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the prompts and answers of requests."""
    group = parser.add_argument_group("requests")
    text = "mix of prompt and answer lengths: fixed (256 and 64 tokens), sharegpt, long (default: %(default)s)"
    group.add_argument("--lengths", default="fixed", metavar="MIX", help=text)
    group.add_argument(
        "--prompt-tokens", metavar="N", help="median prompt of the mix, of each turn (default: the mix's)"
    )
    group.add_argument("--output-tokens", metavar="N", help="median answer of the mix (default: the mix's)")
    text = "maximum tokens of prompt and answer together; longer ones are cut (default: the server's limit)"
    group.add_argument("--context", metavar="N", help=text)
    group.add_argument("--turns", default="1", metavar="N", help="turns of a conversation (default: %(default)s)")
    text = "tokens with which all prompts of a load begin alike (default: %(default)s)"
    group.add_argument("--system-tokens", default="0", metavar="N", help=text)
    text = "mean seconds between an answer and the next turn (default: %(default)s)"
    group.add_argument("--think-time", default="0", metavar="S", help=text)
    text = "text of which prompts are passages, UTF-8, perhaps gzip (default: a novel)"
    group.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "let the first N conversations of a load come again and again (default: none comes twice)"
    group.add_argument("--repeat-prompts", default="0", metavar="N", help=text)

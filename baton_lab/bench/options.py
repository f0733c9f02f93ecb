"""Command-line options of `baton bench`; `baton_lab.bench.parsed` parses their values. Imports little, because every
`baton` command loads this module."""

import argparse
from pathlib import Path

MAX_REQUESTS = 10_000_000
MAX_USERS = 100_000
SECONDS = 60.0
"""Default duration of a load in seconds. Applies if no option limits the load's duration or its number of requests."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that specify the server and the form of its requests."""
    group = parser.add_argument_group("server")
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", metavar="URL", help="server that speaks OpenAI's API, like http://127.0.0.1:8000")
    where.add_argument("--address", metavar="HOST:PORT", help="Baton server to call over gRPC, like 127.0.0.1:50051")
    text = "API to call; for chat, the server applies the chat template (default: %(default)s)"
    group.add_argument("--api", choices=("completions", "chat"), default="completions", help=text)
    group.add_argument(
        "--model", metavar="NAME", help="model name, with --url (default: the first that the server lists)"
    )
    text = "environment variable with the API key, for a server that requires one"
    group.add_argument("--api-key-env", metavar="VARIABLE", help=text)
    text = "seconds after which a request counts as failed (default: %(default)s)"
    group.add_argument("--timeout", default="600", metavar="S", help=text)
    group.add_argument("--temperature", default="0", metavar="T", help="0 is greedy (default: %(default)s)")
    text = "let the model end its answers: do not send ignore_eos, which OpenAI's own servers reject"
    group.add_argument("--allow-eos", action="store_true", help=text)
    group.add_argument(
        "--extra-body", metavar="JSON", help="JSON object with additional fields of each request, with --url"
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that define the arrivals of each load."""
    group = parser.add_argument_group("load (one of --rate, --concurrency, --trace)")
    text = "open loop: requests or conversations started per second; several values make a sweep"
    group.add_argument("--rate", metavar="R,...", help=text)
    text = "shape of the gamma distribution of arrival gaps: 1 is Poisson, less than 1 is bursty (default: %(default)s)"
    group.add_argument("--burstiness", default="1", metavar="B", help=text)
    text = "closed loop: number of users, each with one request at a time; several values make a sweep"
    group.add_argument("--concurrency", metavar="N,...", help=text)
    text = "trace file to replay (format of Mooncake, Azure or BurstGPT), at its own rate or at the rate of --rate"
    group.add_argument("--trace", type=Path, metavar="FILE", help=text)
    text = f"duration of each load's arrivals in seconds (default: {SECONDS:g}, unless --requests or --trace limits it)"
    group.add_argument("--seconds", metavar="S", help=text)
    group.add_argument("--requests", metavar="N", help="maximum number of requests, or conversations, of each load")
    text = "seed of arrivals, lengths and prompts (default: random and printed, so that no prompt is cached)"
    group.add_argument("--seed", metavar="N", help=text)


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the prompts and answers of requests."""
    group = parser.add_argument_group("requests")
    text = "mix of prompt and answer lengths: fixed (256 and 64 tokens), sharegpt, long (default: %(default)s)"
    group.add_argument("--lengths", default="fixed", metavar="MIX", help=text)
    group.add_argument(
        "--prompt-tokens", metavar="N", help="median number of prompt tokens of a turn (default: the mix's)"
    )
    group.add_argument(
        "--output-tokens", metavar="N", help="median number of output tokens of an answer (default: the mix's)"
    )
    text = "maximum tokens of prompt and answer together; longer ones are cut (default: the server's limit)"
    group.add_argument("--context", metavar="N", help=text)
    group.add_argument(
        "--turns", default="1", metavar="N", help="number of turns of a conversation (default: %(default)s)"
    )
    text = "number of tokens of the prefix that all prompts of a load share (default: %(default)s)"
    group.add_argument("--system-tokens", default="0", metavar="N", help=text)
    text = "mean seconds between an answer and the next turn (default: %(default)s)"
    group.add_argument("--think-time", default="0", metavar="S", help=text)
    text = "text file that prompts are taken from, UTF-8 or gzip of it (default: a novel)"
    group.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "number of distinct conversations of a load, which then repeat (default: no conversation repeats)"
    group.add_argument("--repeat-prompts", default="0", metavar="N", help=text)

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
    text = "address of a server with OpenAI's API, for example http://127.0.0.1:8000"
    where.add_argument("--url", metavar="URL", help=text)
    text = "address of a Baton server to call over gRPC, for example 127.0.0.1:50051"
    where.add_argument("--address", metavar="HOST:PORT", help=text)
    text = "OpenAI API to call; chat: the server applies the chat template (default: %(default)s)"
    group.add_argument("--api", choices=("completions", "chat"), default="completions", help=text)
    text = "name of the model, with --url (default: the first that the server lists)"
    group.add_argument("--model", metavar="NAME", help=text)
    text = "environment variable with the API key; needed if the server requires one"
    group.add_argument("--api-key-env", metavar="VARIABLE", help=text)
    text = "time in seconds after which a request counts as failed (default: %(default)s)"
    group.add_argument("--timeout", default="600", metavar="S", help=text)
    text = "sampling temperature; 0: greedy (default: %(default)s)"
    group.add_argument("--temperature", default="0", metavar="T", help=text)
    text = "let the model end its answers early: do not send ignore_eos, which OpenAI's own servers reject"
    group.add_argument("--allow-eos", action="store_true", help=text)
    group.add_argument(
        "--extra-body", metavar="JSON", help="JSON object with additional fields of each request, with --url"
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that define the arrivals of each load."""
    group = parser.add_argument_group("load (one of --rate, --concurrency, --trace)")
    text = "number of requests, or of conversations, started per second (open loop); several values make a sweep"
    group.add_argument("--rate", metavar="R,...", help=text)
    text = "shape of the gamma distribution of arrival gaps: 1 is Poisson, less than 1 is bursty (default: %(default)s)"
    group.add_argument("--burstiness", default="1", metavar="B", help=text)
    text = "number of users, each with one request at a time (closed loop); several values make a sweep"
    group.add_argument("--concurrency", metavar="N,...", help=text)
    text = "trace file to replay, in the format of Mooncake, Azure or BurstGPT; --rate sets another mean rate"
    group.add_argument("--trace", type=Path, metavar="FILE", help=text)
    text = f"duration of a load's arrivals in seconds (default: {SECONDS:g}; no limit with --requests or --trace)"
    group.add_argument("--seconds", metavar="S", help=text)
    text = "maximum number of requests, or of conversations, of each load (default: no limit)"
    group.add_argument("--requests", metavar="N", help=text)
    text = "seed of arrivals, lengths and prompts (default: a random seed, which is printed)"
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
    text = "maximum number of tokens of prompt plus answer; longer requests are cut (default: the server's limit)"
    group.add_argument("--context", metavar="N", help=text)
    group.add_argument(
        "--turns", default="1", metavar="N", help="number of turns of a conversation (default: %(default)s)"
    )
    text = "number of tokens of the prefix that all prompts of a load share (default: %(default)s)"
    group.add_argument("--system-tokens", default="0", metavar="N", help=text)
    text = "mean time in seconds between an answer and the next turn (default: %(default)s)"
    group.add_argument("--think-time", default="0", metavar="S", help=text)
    text = "file with the text of prompts in UTF-8, plain or gzipped (default: a novel)"
    group.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "number of different conversations of a load, which are repeated (default: 0, no conversation is repeated)"
    group.add_argument("--repeat-prompts", default="0", metavar="N", help=text)

"""Implements `baton generate`: sends one prompt to a running server. Writes the generated text to standard output, and
everything else to standard error."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from baton.channel_options import DEFAULT_TARGET
from baton.results.completion import Completion
from deploy.commands.admin_channel import given_key
from deploy.options.prompt import add_prompt, add_sampling, read_prompt, sampling_options
from deploy.options.subcommand import DefaultsFormatter

if TYPE_CHECKING:
    from baton.calls.streams import Stream

BROKEN_PIPE_STATUS = 141
"""Exit status of a program whose output pipe was closed (128 + SIGPIPE), as reported by shells."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `generate` command to the command line."""
    parser = commands.add_parser(
        "generate",
        help="send one prompt to a running server and stream the answer",
        description="Sends one prompt to a running server. Writes the answer to standard output while it is generated, "
        "and then a summary to standard error: numbers of tokens, finish reason, times, seed and request id. Ctrl-C "
        "cancels the request.",
        formatter_class=DefaultsFormatter,
    )
    add_prompt(parser)
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="address of the server")
    text = "time in seconds after which the request ends"
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help=text)
    text = "priority among the waiting requests of the same tenant"
    parser.add_argument("--priority", choices=("interactive", "standard", "batch"), default="standard", help=text)
    text = "tenant of the request; needs a server with orchestrator.trust_tenant_metadata"
    parser.add_argument("--tenant", metavar="NAME", help=text)
    parser.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with the API key of the tenant")
    text = "number of answers, with different seeds; if above 1, each is printed when it is complete"
    parser.add_argument("--n", type=int, default=1, help=text)
    parser.add_argument("--echo", action="store_true", help="print the prompt before the answer")
    text = "use only generation groups that attend to all tokens (no approximate residency)"
    parser.add_argument("--exact", action="store_true", help=text)
    parser.add_argument("--no-usage", action="store_true", help="do not print the summary")
    add_sampling(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `baton generate`; return the exit status."""
    prompt = read_prompt(args.prompt)
    # Keeps gRPC's core from printing lines about lost connections; it reads this once, when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    # Imported here, because it imports grpc: --help and mistyped options are answered at once.
    from baton.client import Client

    messages = [{"role": "user", "content": prompt}] if args.chat else None
    options = sampling_options(args)
    options["n"] = args.n
    text = None if args.chat else prompt
    with (
        Client(args.target, api_key=given_key(args), tenant=args.tenant) as client,
        client.generate(
            text,
            messages=messages,
            echo=args.echo,
            deadline_s=args.deadline,
            priority=args.priority,
            exact=args.exact,
            **options,
        ) as stream,
    ):
        try:
            if args.n == 1:
                _write_out(stream)
            else:
                _write_choices(stream)
        except BrokenPipeError:
            return _leave_pipe()
        finally:
            if not args.no_usage and any(choice.tokens for choice in stream.output.choices):
                print(describe(stream.output), file=sys.stderr)
    return 0


def describe(output: Completion) -> str:
    """Return a one-line summary of the request: tokens, finish reasons, times, and notes about unusual events."""
    finishes = dict.fromkeys("none" if each.finish is None else each.finish.value for each in output.choices)
    num_output_tokens = sum(len(choice.tokens) for choice in output.choices)
    parts = [
        f"{output.num_prompt_tokens} prompt tokens, {num_output_tokens} output tokens",
        f"finish: {', '.join(finishes)}",
    ]
    timings = output.timings
    if timings is not None and timings.time_to_first_token_s is not None:
        parts.append(f"first token after {timings.time_to_first_token_s:.2f} s")
        parts.append(f"all after {(timings.finished_ns - timings.received_ns) / 1e9:.2f} s")
    if timings is not None and timings.speculation is not None:
        parts.append(timings.speculation.text)
    if output.exact is False:
        policy = "" if timings is None or not timings.residency else f" (residency {timings.residency})"
        parts.append(f"approximate attention{policy}")
    if output.num_resumes:
        parts.append(f"resumed after {output.num_resumes} lost connections")
    return "; ".join([*parts, f"seed {output.seed}", f"request {output.request_id}"])


def _write_out(stream: "Stream") -> None:
    try:
        for event in stream:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    finally:
        if stream.output.tokens:
            sys.stdout.write("\n")
            sys.stdout.flush()


def _write_choices(stream: "Stream") -> None:
    """Print each choice after it has ended, because interleaved choices would be unreadable."""
    for event in stream:
        if event.finish is not None:
            choice = stream.output.choices[event.choice]
            print(f"--- choice {choice.index}: {event.finish.value}\n{choice.text}", flush=True)


def _leave_pipe() -> int:
    """Return the exit status for a closed output pipe. Redirects standard output to /dev/null, so that the
    interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE_STATUS

"""The options that commands share, and the prompt they take."""

import argparse
import io
import sys

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_PROMPT_BYTES
from baton.sampling_params import SamplingParams, params_from_options
from deploy.options.prompt import add_prompt, add_sampling, read_prompt, sampling_options


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_prompt(parser)
    add_sampling(parser)
    return parser.parse_args(["Once", *arguments])


def on_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_defaults_are_greedy() -> None:
    assert params_from_options(sampling_options(parsed())) == SamplingParams(max_tokens=128)


def test_every_option_reaches_the_params() -> None:
    arguments = "--max-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 7 --stop a --stop b"
    params = params_from_options(sampling_options(parsed(*arguments.split(), "--ignore-eos")))
    assert params == SamplingParams(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, stop=("a", "b"), ignore_eos=True
    )


def test_seed_is_an_option_only_when_given() -> None:
    assert "seed" not in sampling_options(parsed())
    assert sampling_options(parsed("--seed", "0"))["seed"] == 0


def test_prompt_of_the_command_line() -> None:
    assert read_prompt("caf\u00e9 -") == "caf\u00e9 -"


def test_prompt_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    on_stdin(monkeypatch, b"line 1\nline 2")
    assert read_prompt("-") == "line 1\nline 2"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "prompt is empty"),
        (b"ok \xff", r"prompt is not UTF-8 \(byte 3\)"),
        (b"x" * (MAX_PROMPT_BYTES + 1), f"prompt is longer than {MAX_PROMPT_BYTES} bytes"),
    ],
)
def test_bad_prompt_is_named(monkeypatch: pytest.MonkeyPatch, data: bytes, named: str) -> None:
    on_stdin(monkeypatch, data)
    with pytest.raises(InvalidArgumentError, match=named):
        read_prompt("-")


def test_bytes_of_the_command_line_that_are_no_text() -> None:
    with pytest.raises(InvalidArgumentError, match="not UTF-8"):
        read_prompt("\udcff")

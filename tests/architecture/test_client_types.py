"""What the client returns has a type that a user's type checker knows, under the names that `baton` exports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import ROOT

pytestmark = pytest.mark.integration

PROGRAM = """
from collections.abc import Iterator
from typing import assert_type

import baton


def texts(client: baton.Client) -> Iterator[str]:
    with client.generate(prompt="Once", max_tokens=4, temperature=0.5) as stream:
        assert_type(stream, baton.Stream)
        for event in stream:
            assert_type(event, baton.TokenEvent)
            yield event.text
        assert_type(stream.usage, baton.Usage | None)
        assert_type(stream.timings, baton.Timings | None)


def choices(client: baton.Client) -> list[baton.Choice]:
    completion = client.generate(prompt="Once", n=2).collect()
    assert_type(completion, baton.Completion)
    for choice in completion.choices:
        for token in choice.tokens:
            assert_type(token, baton.SampledToken)
    return list(completion.choices)


def groups(client: baton.Client) -> tuple[baton.GroupState, ...]:
    model = client.model()
    assert_type(model, baton.ModelInfo)
    state = client.cluster_state()
    assert_type(state, baton.ClusterState)
    for group in state.groups:
        assert_type(group.generation, baton.GenerationStatus | None)
        for status in group.ranks.values():
            assert_type(status, baton.PrefillStatus)
    return state.groups


def ranks(timings: baton.Timings) -> tuple[baton.RankTiming, ...]:
    assert_type(timings.prefill.width, baton.WidthChoice | None)
    assert_type(timings.prefill.placement, baton.Placement | None)
    return timings.prefill.ranks


async def collected(client: baton.AsyncClient) -> baton.Completion:
    stream = client.generate(messages=[{"role": "user", "content": "hi"}])
    assert_type(stream, baton.AsyncStream)
    return await stream.collect()
"""


WRONG = PROGRAM.replace("assert_type(model, baton.ModelInfo)", "assert_type(model, baton.Usage)")


def test_a_client_program_type_checks_and_a_wrong_type_is_found(tmp_path: Path) -> None:
    run = check(tmp_path, right=PROGRAM, wrong=WRONG)
    (error,) = (line for line in run.stdout.splitlines() if ": error: " in line)
    assert run.returncode == 1 and "wrong.py" in error and "ModelInfo" in error, run.stdout


def check(folder: Path, **programs: str) -> "subprocess.CompletedProcess[str]":
    """Run mypy on the programs, each in a file of its name."""
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    paths = [str(folder / f"{name}.py") for name in programs]
    options = ("--strict", "--config-file", "", "--cache-dir", str(folder / "cache"))
    # As of an installed package, what is amiss in `baton` itself is not told.
    command = [sys.executable, "-m", "mypy", *options, "--follow-imports", "silent", *paths]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=110)

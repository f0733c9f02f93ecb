"""Random and mutated structured-output constraints of any kind. Each is refused or compiled within its limits, and ends
no process except its compiler's child process."""

import asyncio
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import FORM_MEMORY_BYTES, MAX_COMPILED_BYTES
from baton.sampling_params import StructuredOutput
from baton.text.form_prover import FormProver
from tests.support.models.tiny_tokenizer import EOS_ID, letter_tokenizer
from tests.support.wire.hostile.forms import random_form

pytestmark = pytest.mark.integration

SEED = 1
MOST_S = 3.0
"""Processor seconds of one form, with what its child does besides."""
MOST_GROWTH_BYTES = 64 * 2**20
NUM_FIRST = 100
"""Forms after which the process has loaded all that it uses."""
NUM_PREPARED = 200


def pids_of(prover: FormProver) -> list[int]:
    return [child._process.pid for child in prover._children]


def used_s(prover: FormProver) -> float:
    """Processor seconds of the prover's children, those that have ended included."""
    ended, ticks = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    for pid in pids_of(prover):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _draw(sample: list[StructuredOutput], num_before: int, form: StructuredOutput, rng: Random) -> None:
    """Take the form into a sample of NUM_PREPARED, each form so far with the same probability."""
    if len(sample) < NUM_PREPARED:
        sample.append(form)
    elif (place := rng.randrange(num_before + 1)) < NUM_PREPARED:
        sample[place] = form


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(200, marks=pytest.mark.ci, id="few"),
        pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)], id="many"),
    ],
)
async def test_no_form_costs_more_than_its_child(number: int) -> None:
    rng, prover = Random(SEED), FormProver(letter_tokenizer().to_json, (EOS_ID,))
    sample, num_accepted, first_bytes = list[StructuredOutput](), 0, 0
    try:
        for index in range(number):
            if index == NUM_FIRST:
                first_bytes = memory_bytes()
            if not prover._children:
                await prover.prove(StructuredOutput(regex=f"start{index}"))  # starts a child, which takes a while
            form, pids, before_s = random_form(rng), pids_of(prover), used_s(prover)
            is_costly = False
            try:
                _draw(sample, num_accepted, await prover.prove(form), rng)
                num_accepted += 1
            except InvalidArgumentError as error:
                is_costly = "cannot be compiled within" in str(error)
            assert pids_of(prover) == ([] if is_costly else pids), f"{index}: a child ended, but not by its form"
            assert used_s(prover) - before_s < MOST_S, f"{index}: {form}"
        assert memory_bytes() - first_bytes < MOST_GROWTH_BYTES
    finally:
        await prover.close()
    assert num_accepted > number // 5
    command = [sys.executable, "-m", "tests.support.wire.hostile.forms"]
    prepared = await asyncio.to_thread(
        subprocess.run, command, input=json.dumps([*map(asdict, sample)]), capture_output=True, text=True, check=False
    )
    assert prepared.returncode == 0, prepared.stderr
    most_s, most_bytes = json.loads(prepared.stdout)
    assert most_s < MOST_S
    assert most_bytes < FORM_MEMORY_BYTES + MAX_COMPILED_BYTES

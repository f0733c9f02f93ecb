"""Random, mutated and well-known structured-output constraints of any kind. Each is refused or compiled within its
limits, and ends no process except its compiler's child process."""

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from baton.errors import InvalidArgumentError
from baton.modeling.checkpoints.weights import load_config
from baton.sampling_params import StructuredOutput
from baton.text.form_prover import FormProver
from baton.text.tokenizer import Tokenizer
from benchmarks.support.processor_time import used_s
from tests.support.models.tiny_tokenizer import EOS_ID, letter_tokenizer
from tests.support.wire.hostile.forms import NUM_FIRST, random_form, resident_bytes
from tests.support.wire.hostile.named_forms import named_forms

pytestmark = pytest.mark.integration

SEED = 1
MOST_S = 3.0
"""Processor seconds of one form, with what its child does besides."""
MOST_GROWTH_BYTES = 64 * 2**20


class Watched:
    """A prover, of which always one child is ready, so that no form is blamed for the start of a child."""

    def __init__(self, prover: FormProver) -> None:
        self.prover = prover
        self._num_started = 0

    @property
    def pids(self) -> list[int]:
        return [child._process.pid for child in self.prover._children]

    @property
    def resident_bytes(self) -> int:
        """Return the memory of this process and of the prover's children."""
        return resident_bytes([os.getpid(), *self.pids])

    async def ask(self, form: StructuredOutput, name: object) -> StructuredOutput | None:
        """Prove a form within the limits; None: it is refused. No child may end, except by its form."""
        pids, before_s = self.pids, self._used_s()
        proven, is_costly = None, False
        try:
            proven = await self.prover.prove(form)
        except InvalidArgumentError as error:
            is_costly = "cannot be compiled within" in str(error)
        assert self.pids == ([] if is_costly else pids), f"{name}: a child ended, but not by its form"
        assert self._used_s() - before_s < MOST_S, f"{name}: {str(form)[:300]}"
        if is_costly:
            await self.start()
        return proven

    async def start(self) -> None:
        """Start a child."""
        self._num_started += 1
        await self.prover.prove(StructuredOutput(regex=f"start{self._num_started}"))

    def _used_s(self) -> float:
        """Return the processor seconds of the children, those that have ended included."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime + sum(used_s(self.pids).values())


@asynccontextmanager
async def watched(folder: Path | None) -> AsyncIterator[Watched]:
    """A prover for the model in a folder; None: for the tokenizer of letters."""
    if folder is None:
        prover = FormProver(letter_tokenizer().to_json, (EOS_ID,))
    else:
        prover = FormProver(Tokenizer.load(folder).to_json, load_config(folder).eos_token_ids)
    try:
        made = Watched(prover)
        await made.start()
        yield made
    finally:
        await prover.close()


@pytest.mark.parametrize(
    ("number", "is_real"),
    [
        pytest.param(200, False, marks=pytest.mark.ci, id="few"),
        pytest.param(10_000, False, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)], id="many"),
        pytest.param(2000, True, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)], id="SmolLM2"),
    ],
)
async def test_no_form_costs_more_than_its_child(number: int, is_real: bool, request: pytest.FixtureRequest) -> None:
    folder: Path | None = request.getfixturevalue("smollm2") if is_real else None
    rng, accepted, first_bytes = Random(SEED), list[tuple[int, int]](), 0
    async with watched(folder) as made:
        for index in range(number):
            if index == NUM_FIRST:
                first_bytes = made.resident_bytes
            if (proven := await made.ask(random_form(rng), index)) is not None:
                accepted.append((index, proven.compiled_bytes))
        assert made.resident_bytes - first_bytes < MOST_GROWTH_BYTES
    assert len(accepted) > number // 5
    command = [sys.executable, "-m", "tests.support.wire.hostile.forms"]
    asked = json.dumps([SEED, str(folder or ""), accepted])
    prepared = await asyncio.to_thread(
        subprocess.run, command, input=asked, capture_output=True, text=True, check=False
    )
    assert prepared.returncode == 0, prepared.stderr
    most_s, growth_bytes = json.loads(prepared.stdout)
    assert most_s < MOST_S
    assert growth_bytes < MOST_GROWTH_BYTES


@pytest.mark.ci
async def test_forms_that_ended_processes_or_took_minutes_are_decided_within_their_limits(smollm2: Path) -> None:
    async with watched(smollm2) as made:
        decided = {name: await made.ask(form, name) for name, form in named_forms().items()}
    accepted = {name for name, proven in decided.items() if proven is not None}
    assert accepted >= {name for name in decided if name.endswith("within the bound")}
    assert len(accepted) < len(decided)

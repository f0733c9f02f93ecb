"""Measures the processor time that a generation engine's Python code needs for a decode step, without the model.

The engine is complete, but its decoder computes nothing: each forward pass advances the engine's clock by the time that
it would take on a GPU. All sequences decode greedily. Values are medians over the steps, in microseconds of processor
time of the engine's thread:

    engine      whole step without the decoder: scheduling, planning of drafts, sampling, text and events
    planner     planning of drafts, and learning from the result of the step (`generate_workers.speculation`)

There are two loads. `plain`: prompts of random text of 500 tokens, for which drafts seldom pay. `drafts`: prompts of
4,000 equal tokens, and answers of the same token, so that each sequence gets drafts in each step, and all are accepted.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder, SequenceSpan
from baton.planning.work_cost import StepWork, WorkCost
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenEvent
from deploy.options.numbers import counts
from deploy.options.screen import number_table
from generate_workers.engine.rows import GenerationRequest
from generate_workers.speculation.speculator import Speculator
from tests.support.engines.generation import Harness, harness
from tests.support.manual_clock import ManualClock
from tests.support.models.tiny_models import random_decoder
from tests.support.models.tiny_tokenizer import NUM_LETTERS

COST = WorkCost(step_s=5e-3, token_s=1e-5, key_s=4.7e-8, pair_s=1e-9)
"""Rough costs of a step of a model of 8B parameters on an H100."""
PROMPT_TOKENS = {"plain": 500, "drafts": 4000}
MOST_OUTPUT = 1200
"""Maximum number of output tokens of a sequence."""


class StubDecoder(Decoder):
    """Decoder that computes nothing. Each forward pass advances a clock by the time that it would take."""

    def __init__(self, decoder: Decoder, clock: ManualClock, next_ids: Sequence[int]) -> None:
        """`next_ids`: most likely next tokens, which alternate."""
        super().__init__(decoder.config, decoder.weights, decoder.kernel)
        self.spent_s = 0.0
        """Processor time in seconds that this object has used."""
        self._clock = clock
        self._logits_RV = torch.zeros(len(next_ids), self.config.vocab_size)
        self._logits_RV[range(len(next_ids)), next_ids] = 9.0
        self._num_given = 0

    def forward(
        self, token_ids: Sequence[int] | Tensor, spans: Sequence[SequenceSpan], *args: Any, **options: Any
    ) -> Tensor:
        """Return hidden states of zeros."""
        started_s = time.thread_time()
        num_keys = sum(span.tokens.end for span in spans)
        self._clock.advance(COST.seconds(StepWork(len(token_ids), num_keys, num_keys)))
        results = options.get("results")
        hidden_RD = torch.zeros(len(token_ids if results is None else results), self.config.hidden_size)
        self.spent_s += time.thread_time() - started_s
        return hidden_RD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits whose maxima are the next tokens."""
        started_s = time.thread_time()
        places = (torch.arange(len(hidden_RD)) + self._num_given) % len(self._logits_RV)
        self._num_given += len(hidden_RD)
        logits_RV = self._logits_RV[places]
        self.spent_s += time.thread_time() - started_s
        return logits_RV


def measure(load: str, num_rows: int, num_steps: int) -> tuple[float, float]:
    """Return the medians of the microseconds of a step in the engine and in the planner of drafts."""
    chance, num_tokens = np.random.default_rng(5), PROMPT_TOKENS[load]
    next_ids = chance.integers(0, NUM_LETTERS, 4099).tolist() if load == "plain" else [7]
    most_tokens, clock = num_tokens + MOST_OUTPUT, ManualClock(start_s=100.0)
    decoder = StubDecoder(random_decoder(num_layers=1, max_position=most_tokens), clock, next_ids)
    with harness(
        decoder=decoder,
        clock=clock,
        num_slots=num_rows,
        max_waiting=num_rows,
        max_slot_tokens=most_tokens,
        max_batched_tokens=8192,
        poison=False,
        speculation="auto",
        draft_tokens=0,
        draft_keys=256,
        cost=COST,
    ) as made:
        params = SamplingParams(max_tokens=MOST_OUTPUT, temperature=0.0, ignore_eos=True)
        events: deque[TokenEvent] = deque(maxlen=1)
        for index in range(num_rows):
            prompt = chance.integers(0, NUM_LETTERS, num_tokens) if load == "plain" else np.full(num_tokens, 7)
            request = GenerationRequest(RequestId(f"r{index}"), tuple(prompt.tolist()), (), params)
            made.engine.submit(request, events.append)
        return _steps(made, decoder, num_rows, num_steps)


def _steps(made: Harness, decoder: StubDecoder, num_rows: int, num_steps: int) -> tuple[float, float]:
    """Run steps until all sequences decode, and then `num_steps` steps that are measured."""
    planner = _Timed(made)
    engine_us, planner_us = list[float](), list[float]()
    while len(engine_us) < num_steps:
        before_s = time.thread_time(), decoder.spent_s, planner.spent_s
        made.engine.step()
        took_s = time.thread_time() - before_s[0] - (decoder.spent_s - before_s[1])
        last = made.engine.status().last_step
        assert last is not None
        if last.num_decode_rows == num_rows and not last.num_prefill_tokens:
            engine_us.append(took_s * 1e6)
            planner_us.append((planner.spent_s - before_s[2]) * 1e6)
        assert len(engine_us) < 2 or last.num_decode_rows == num_rows, "some sequences have ended: measure fewer steps"
    for row in list(made.engine._running.rows.values()):
        made.engine.cancel(row.stream.stream_id)
    made.engine.step()
    return statistics.median(engine_us), statistics.median(planner_us)


class _Timed:
    """Adds up the processor time of the methods of an engine's planner of drafts."""

    def __init__(self, made: Harness) -> None:
        self.spent_s = 0.0
        speculation = made.engine._speculation
        assert isinstance(speculation, Speculator)
        for name in ("plan", "observe"):
            setattr(speculation, name, self._timed(getattr(speculation, name)))
        made.engine._running.speculation = speculation

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started_s = time.thread_time()
            try:
                return call(*args)
            finally:
                self.spent_s += time.thread_time() - started_s

        return run


def main() -> int:
    """Run the measurements and print a table. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", default="1,16,64,256", metavar="N,...", help="numbers of sequences (default: %(default)s)"
    )
    parser.add_argument("--steps", default=60, type=int, metavar="N", help="number of steps (default: %(default)s)")
    args = parser.parse_args()
    columns = ["load", "sequences", "engine, us", "planner, us", "planner per sequence, us"]
    table = number_table("processor time of a decode step", columns)
    for load in PROMPT_TOKENS:
        for num_rows in counts("--rows", args.rows, 1024):
            engine_us, planner_us = measure(load, num_rows, args.steps)
            cells = [f"{engine_us:.0f}", f"{planner_us:.0f}", f"{planner_us / num_rows:.1f}"]
            print(load, num_rows, *cells, flush=True)
            table.add_row(load, str(num_rows), *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Benchmark of structured output: measures how much time token masks add to a step in which all sequences are
constrained.

Two engines run the same number of sequences of one model, sampled at temperature 1. In one engine, a JSON schema
constrains the sequences. The schema requires an array of at least 1,000 elements, so that no sequence ends during the
measurement. In the other engine, sequences are unconstrained (baseline `plain`). The engines are measured alternately.
A measured step includes the conversion of tokens to text and the events for the caller. A separate thread computes the
masks during the forward pass. The measured cost is therefore the processor time that this thread takes from the forward
pass, and the time to apply the masks.

Output rows: step_ms by batch size. If `--bars` is given, the benchmark fails if a step with 16 sequences takes more
than 5 % longer than a plain one.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams, StructuredOutput
from baton.text.tokenizer import Tokenizer
from baton.types import RequestId
from benchmarks.support.harness import (
    PAIRS,
    QUICK_PAIRS,
    Bars,
    Reporter,
    case,
    interleave,
    make_parser,
    random_prompt,
    resolve,
)
from generate_workers.config import EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.rows import GenerationRequest
from generate_workers.engine.served_model import ServedModel
from generate_workers.slots.table import SlotTable

BAR = 1.05
"""Maximum ratio of the duration of a constrained step to that of an unconstrained one, with 16 sequences."""
_STEPS = 16
"""Number of steps of one measurement."""
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
    },
    "required": ["name", "age", "colour", "born", "tags"],
    "additionalProperties": False,
}
FORM = StructuredOutput(json=json.dumps({"type": "array", "items": _PERSON, "minItems": 1000}))


class Rows:
    """Engine with running sequences. Create with `running`."""

    def __init__(self, engine: GenerationEngine, batch: int) -> None:
        self._engine = engine
        self._batch = batch

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, decoder: Decoder, tokenizer: Tokenizer, prompts: list[tuple[int, ...]], params: SamplingParams
    ) -> Iterator["Rows"]:
        """Context manager. Create an engine with one sequence per prompt, and yield it when all sequences have their
        first token. The engine is closed on exit."""
        clock, longest = SystemClock(), max(map(len, prompts)) + params.max_tokens
        config = EngineConfig(num_slots=len(prompts), max_slot_tokens=longest, speculation="off")
        slots = SlotTable(make_memory(decoder, config), clock, endpoint="none:0")
        model = ServedModel(decoder, tokenizer)
        running = RunningRows(slots, ChunkedPrefillPolicy.of(config, model))
        engine = GenerationEngine(model, running, config)
        try:
            for number, prompt in enumerate(prompts):
                own = params.of_choice(number)
                engine.submit(GenerationRequest(RequestId(f"row-{number}"), prompt, (), own), lambda event: None)
            made = cls(engine, len(prompts))
            while not made._all_run():
                engine.step()
            yield made
        finally:
            engine.close()

    def step_ms(self) -> float:
        """Run `_STEPS` steps, and return the mean duration of a step in milliseconds."""
        start_s = time.perf_counter()
        for _ in range(_STEPS):
            self._engine.step()
        elapsed_s = time.perf_counter() - start_s
        assert self._all_run(), "a row has ended"
        return elapsed_s / _STEPS * 1e3

    def _all_run(self) -> bool:
        step = self._engine.status().last_step
        return step is not None and step.num_decode_rows == self._batch


def measure(args: argparse.Namespace, folder: Path, reporter: Reporter, bars: Bars) -> None:
    """Measure the step times for each batch size. Check the limit for the largest batch size."""
    decoder, tokenizer = load_decoder(folder, dtype=args.dtype), Tokenizer.load(folder)
    pairs = QUICK_PAIRS if args.quick else 3 * PAIRS
    num_tokens = _STEPS * (pairs + 1) + 200
    free = SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True)
    bound = SamplingParams(max_tokens=num_tokens, temperature=1.0, structured_output=FORM)
    for batch in (1, 16):
        prompts = [random_prompt(args.context, seed) for seed in range(batch)]
        with (
            Rows.running(decoder, tokenizer, prompts, bound) as ours,
            Rows.running(decoder, tokenizer, prompts, free) as theirs,
        ):
            found = interleave(ours.step_ms, theirs.step_ms, pairs)
        name = case(batch=batch, context=args.context, dtype=args.dtype, threads=torch.get_num_threads())
        row = reporter.add(name, "step_ms", "ms", "plain", found)
        if args.bars and batch == 16:
            bars.at_most(f"{name}: a constrained step over a plain one", 1 / row.ratio, BAR)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--context", type=int, default=192, help="number of prompt tokens of each sequence")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    reporter, bars = Reporter("structured", args.json), Bars()
    measure(args, resolve(args), reporter, bars)
    reporter.close()
    return bars.close()


if __name__ == "__main__":
    sys.exit(main())

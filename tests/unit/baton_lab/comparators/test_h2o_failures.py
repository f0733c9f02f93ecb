"""A pushed prompt that H2O cannot run again ends its own stream, and no other."""

import dataclasses

import pytest
import torch

from baton.sampling_params import SamplingParams
from baton.types import FinishReason, SampledToken, SlotId, TokenRange
from baton_lab.comparators.h2o import H2oResidency
from baton_lab.comparators.heavy_hitters import HeavyBudget
from generate_workers.residency.port import KvShape, RowError
from generate_workers.residency.row_parts import MakeMemory
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.generation import Harness, harness, prefilled, prompt, reference_ids
from tests.support.engines.slot_tables import push_buffer
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder

pytestmark = needs_rows
DECODER = random_decoder(num_layers=4)
OTHER_MODEL = random_decoder(num_layers=4, seed=1)
EVERYTHING = HeavyBudget(1.0, 1.0)
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
ERROR = "the pushed KV of position 0 is of no token of this model: check what pushes it"


def h2o(shape: KvShape, make_memory: MakeMemory) -> H2oResidency:
    return H2oResidency(shape, make_memory, DECODER, EVERYTHING)


def submit_another_models(made: Harness, params: SamplingParams) -> None:
    """A request whose KV came from a group of another model."""
    ids = prompt(30, seed=5)
    ref = made.reserve(30, 60, num_choices=params.n).ref
    buffer, _ = prefilled(OTHER_MODEL, ids)
    push_buffer(made.slots, ref, buffer, buffer.tokens)
    made.commit(ref, *[SampledToken(5)] * params.n)
    made.submit(ids, params, ref=ref)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_kv_of_another_model_ends_its_stream_and_no_other(num_choices: int) -> None:
    """All others, rows that run and one that is pushed besides, go on with the tokens that they would have had."""
    with harness(decoder=DECODER, policy=h2o, num_slots=8) as made:
        streams = {length: made.submit(prompt(length), PARAMS)[1] for length in (40, 12)}
        for _ in range(5):
            made.engine.step()
        submit_another_models(made, dataclasses.replace(PARAMS, n=num_choices))
        bad = made.streams[-1]
        ref = made.reserve(33, 60).ref
        made.push_and_commit(ref, prompt(33), PARAMS)
        streams[33] = made.submit(prompt(33), PARAMS, ref=ref)[1]
        made.run()
    ends = [event for event in bad.events if event.finish is not None]
    assert len(ends) == num_choices
    assert all(event.finish is FinishReason.ERROR and event.error.endswith(ERROR) for event in ends)
    for length, stream in streams.items():
        assert stream.finish is FinishReason.LENGTH
        assert stream.token_ids == reference_ids(DECODER, prompt(length), PARAMS)


def test_every_bad_row_of_a_step_ends() -> None:
    with harness(decoder=DECODER, policy=h2o, num_slots=8) as made:
        good = made.submit(prompt(12), PARAMS)[1]
        submit_another_models(made, PARAMS)
        submit_another_models(made, PARAMS)
        made.run()
    assert [stream.error for stream in made.streams] == ["", f"RowError: {ERROR}", f"RowError: {ERROR}"]
    assert good.token_ids == reference_ids(DECODER, prompt(12), PARAMS)


def test_a_step_names_the_row_that_it_cannot_begin_with() -> None:
    residency = h2o(KvShape(DECODER.layout, DECODER.config.windows, 2, 64), PoisonedMemory)
    for slot, decoder in enumerate((DECODER, OTHER_MODEL)):
        buffer, _ = prefilled(decoder, prompt(20))
        row = residency.open(SlotId(slot), 20, 64)
        for layer in range(DECODER.layout.num_layers):
            row.write(layer, buffer.tokens, buffer.export(layer, buffer.tokens)).result()
    rows = [(SlotId(slot), TokenRange(20, 21)) for slot in range(2)]
    with pytest.raises(RowError, match="the pushed KV of position 0") as raised, residency.step(rows):
        raise AssertionError("it began")
    assert raised.value.slot == 1
    with torch.inference_mode(), residency.step(rows[:1]) as step:
        DECODER.forward([5], step.spans, step)
    assert residency.num_link_bytes > 0
    for slot in range(2):
        residency._rows[slot].release()

"""Bytes that steps report as read and copied, with drafts, against counts of every key and every copy."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from baton.modeling.device.copying import copy_bytes
from baton.modeling.forward.decoder import Decoder, SequenceSpan
from baton.modeling.forward.weight_sizes import bytes_per_step
from baton.sampling_params import SamplingParams
from generate_workers.engine.status import StepStats
from tests.support.engines.generation import Harness, eos_decoder, harness, prompt, small_decoder

NUM_DRAFTS, DRAFT_KEYS = 3, 24


class Counted:
    """Keys that the forwards of a decoder read, and bytes that a link copied."""

    def __init__(self, decoder: Decoder) -> None:
        self.num_kv_bytes = self.num_forwards = self.num_link_bytes = 0
        self._layers, self._row_bytes = range(decoder.config.num_layers), decoder.layout.row_bytes
        self._forward: Callable[..., Tensor] = decoder.forward

    def forward(self, token_ids: list[int], spans: Sequence[SequenceSpan], *args: Any, **options: Any) -> Tensor:
        self.num_forwards += 1
        rows = (rows for layer in self._layers for span in spans for rows in span.segments(layer))
        self.num_kv_bytes += self._row_bytes * sum(len(each.k_SGH) for each in rows)
        return self._forward(token_ids, spans, *args, **options)

    def copy(self, to: Tensor, source: Tensor) -> None:
        self.num_link_bytes += source.nbytes
        copy_bytes(to, source)


def steps_of(made: Harness, *prompts: tuple[int, ...], max_tokens: int = 30) -> list[StepStats]:
    """The report of each step, until rows with these prompts have ended."""
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=5, ignore_eos=True)
    streams = [made.submit(each, params)[1] for each in prompts]
    steps = []
    while not all(stream.ended.is_set() for stream in streams):
        made.engine.step()
        last = made.engine.status().last_step
        assert last is not None
        steps.append(last)
    return steps


@pytest.mark.parametrize("speculation", ["off", "streaming", "ngram", "auto"])
@pytest.mark.parametrize("policy", ["device", "host"])
def test_all_that_is_read_and_copied_is_counted(policy: str, speculation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are shorter and longer than what drafts attend to."""
    decoder = eos_decoder()
    counted = Counted(decoder)
    monkeypatch.setattr(decoder, "forward", counted.forward)
    options: dict[str, Any] = {"speculation": speculation, "draft_tokens": NUM_DRAFTS, "draft_keys": DRAFT_KEYS}
    with harness(decoder=decoder, policy=policy, copy=counted.copy, **options) as made:
        steps = steps_of(made, prompt(5), prompt(40), prompt(20) * 3)
        assert sum(step.num_kv_bytes for step in steps) == counted.num_kv_bytes
        assert sum(step.num_weight_bytes for step in steps) == counted.num_forwards * bytes_per_step(decoder.weights)
        assert sum(step.num_link_bytes for step in steps) == counted.num_link_bytes
        assert bool(counted.num_link_bytes) == (policy == "host")
    assert any(step.num_drafts for step in steps) == (speculation != "off")
    has_steps = speculation in ("streaming", "auto")
    assert any(step.num_draft_kv_bytes for step in steps) == has_steps == (counted.num_forwards > len(steps))


def test_drafts_of_another_model_read_its_keys_and_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model knows rows from their first token on; they are shorter and longer than what drafts attend to."""
    decoder, small = eos_decoder(), small_decoder()
    counted, drafted = Counted(decoder), Counted(small)
    for each, count in ((decoder, counted), (small, drafted)):
        monkeypatch.setattr(each, "forward", count.forward)
    options: dict[str, Any] = {"draft_model": small, "draft_tokens": NUM_DRAFTS, "draft_keys": DRAFT_KEYS}
    with harness(decoder=decoder, speculation="model", **options) as made:
        steps = steps_of(made, prompt(1), prompt(1, seed=1), max_tokens=60)
    assert drafted.num_forwards > 10
    assert sum(step.num_draft_kv_bytes for step in steps) == drafted.num_kv_bytes
    assert sum(step.num_kv_bytes for step in steps) == counted.num_kv_bytes + drafted.num_kv_bytes
    weights = [each.num_forwards * bytes_per_step(of.weights) for each, of in ((counted, decoder), (drafted, small))]
    assert sum(step.num_weight_bytes for step in steps) == sum(weights)


def test_a_round_over_a_link_fetches_all_keys_once_for_all_its_tokens() -> None:
    """Of one row whose drafts see all keys, so that all are accepted: fetched are the cached tokens, stored the new
    ones, and brought beside them those that have become final."""
    decoder, length = eos_decoder(), 60
    token_bytes = decoder.layout.token_bytes
    with harness(decoder=decoder, policy="host", speculation="streaming", draft_keys=128, poison=False) as made:
        *_, before, last, _ = steps_of(made, prompt(length), max_tokens=1 + 5 * (NUM_DRAFTS + 1))
    known = length + 1 + 3 * (NUM_DRAFTS + 1)  # of the row when the last but one round begins
    assert before.num_drafts == last.num_drafts == NUM_DRAFTS
    fetched, stored, beside = known - 1, NUM_DRAFTS + 1, NUM_DRAFTS + 1
    assert last.num_link_bytes == (fetched + stored + beside) * token_bytes
    with harness(decoder=decoder, policy="host", poison=False) as made:
        plain = steps_of(made, prompt(length), max_tokens=10)[-1]
    assert last.num_link_bytes / (NUM_DRAFTS + 1) < 0.45 * plain.num_link_bytes

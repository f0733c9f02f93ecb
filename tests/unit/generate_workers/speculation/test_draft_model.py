"""Drafts by a small model: over its first and latest keys, whatever was accepted; its memory; what is refused."""

import dataclasses
import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.errors import ConfigError, ModelError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.attention import plain_kernel
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.planning.work_cost import StepWork, WorkCost
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.settings.place import WorkerPlace
from baton.text.tokenizer import Tokenizer
from baton.types import SampledToken, TokenRange
from generate_workers.config import AcceptanceName, EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import StepPlan
from generate_workers.engine.step_bound import PrefillWork
from generate_workers.host import _load_draft_model
from generate_workers.residency.port import DraftKeys
from generate_workers.speculation.draft_model import ModelProposer
from generate_workers.speculation.port import DraftRequest
from generate_workers.speculation.speculator import Speculator
from generate_workers.speculation.stepwise import Going, draft_by_steps
from generate_workers.speculation.streaming_view import NarrowSpan
from tests.support.engines.batches import bounded
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.generation import (
    Harness,
    WatchedDecoder,
    draft_kv_of,
    eos_decoder,
    harness,
    prompt,
    reference_ids,
    small_decoder,
)
from tests.support.engines.slot_tables import page_bytes
from tests.support.manual_clock import ManualClock
from tests.support.models.letter_models import write_letter_model
from tests.support.models.tiny_models import random_decoder
from tests.support.models.tiny_tokenizer import VOCAB_SIZE

KEYS = DraftKeys(num_first=3, num_last=6, most_drafts=8)
PARAMS = SamplingParams(max_tokens=150, temperature=0.8, seed=5, ignore_eos=True)
SMALL = small_decoder()
LENGTHS = (1, 2, 4, 9, 25, 90)


def rows_of(made: Harness) -> list[Row]:
    """Rows that decode, one of each length, oldest first."""
    for length in LENGTHS:
        made.submit(prompt(length), PARAMS)
    while len(rows := list(made.engine._running.rows.values())) < len(LENGTHS) or not all(
        row.sampler.position for row in rows
    ):
        made.engine.step()
    return rows


class Reference:
    """One row's drafts by the definition: KV of all positions, and tokens that lie between are hidden."""

    def __init__(self, decoder: Decoder, row: Row) -> None:
        self.decoder, self.row = decoder, row
        self.kv = KvBuffer(decoder.layout, TokenRange(0, 300))
        self.kv.data.fill_(float("nan"))
        self.num_seen = 0

    def run(self, start: int, ids: list[int]) -> Tensor:
        tokens = TokenRange(start, start + len(ids))
        unseen = TokenRange(KEYS.num_first, max(KEYS.num_first, min(start, tokens.end - KEYS.num_last)))
        span = BufferSpan(self.kv, tokens)
        return self.decoder.forward(ids, [NarrowSpan(span, unseen) if unseen else span])

    def drafts(self, num_drafts: int) -> list[int]:
        ids = self.row.token_ids
        start = min(KEYS.num_first, len(ids) - 1)
        if self.num_seen < start:
            self.run(self.num_seen, ids[self.num_seen : start])
        latest = max(self.num_seen, start, len(ids) - 1 - KEYS.num_last)
        if latest < len(ids) - 2:
            self.run(latest, ids[latest:-1])
            latest = len(ids) - 1

        def step(going: Going, index: int) -> Tensor:
            ((_, draft),) = going
            first = len(ids) + index - 1 if index else latest
            return self.decoder.logits(self.run(first, [*ids, *draft.token_ids][first:])[-1:])

        return draft_by_steps([DraftRequest(self.row, num_drafts)], step, keeps=False)[0].token_ids

    def accepted(self, num_accepted: int, num_known: int, num_drafts: int) -> None:
        """All known tokens are seen, and of the drafts those that were run and accepted."""
        self.num_seen = num_known + min(num_accepted, num_drafts - 1)


@pytest.mark.parametrize("kernel", [None, plain_kernel], ids=["rows", "plain"])
def test_drafts_follow_from_the_first_and_latest_keys_whatever_was_accepted(kernel: object) -> None:
    """Through rejections, rounds in which all are accepted, and plain steps between rounds."""
    small, chance = Decoder(SMALL.config, SMALL.weights, kernel), random.Random(4)  # type: ignore[arg-type]
    with harness(num_slots=8, max_slot_tokens=256) as made, torch.inference_mode():
        rows = rows_of(made)
        proposer = ModelProposer(small, KEYS, len(rows), PoisonedMemory)
        references = {row: Reference(small, row) for row in rows}
        for _ in range(14):
            draft_requests = [DraftRequest(row, chance.randrange(1, 9)) for row in rows if chance.random() < 0.8]
            proposer.prepare([draft_request.row for draft_request in draft_requests])
            drafts = proposer.draft(draft_requests)
            for (row, num_drafts, _), draft in zip(draft_requests, drafts, strict=True):
                assert draft.token_ids == references[row].drafts(num_drafts)
                num_accepted, num_known = (
                    chance.choice((0, num_drafts, chance.randrange(num_drafts + 1))),
                    row.num_known,
                )
                rejected = draft.token_ids[num_accepted] if num_accepted < num_drafts else 0
                for token_id in [*draft.token_ids[:num_accepted], (rejected + 1) % 90]:
                    row.accept(SampledToken(token_id), 0)
                references[row].accepted(num_accepted, num_known, num_drafts)
            row = chance.choice(rows)
            for token_id in range(chance.choice((1, 3, 11))):
                row.accept(SampledToken(token_id), 0)
        for row in rows:
            proposer.forget(row)
        assert proposer.num_bytes == 0
        made.engine.close()


@pytest.mark.parametrize("acceptance", ["coupled", "maximal"])
def test_the_model_as_its_own_draft_is_right_while_its_keys_are_all(acceptance: AcceptanceName) -> None:
    """One token by the step that prefills, then rounds of one and three drafts."""
    params = SamplingParams(max_tokens=1 + 4 * 6, temperature=0.8, seed=3, ignore_eos=True)
    decoder = eos_decoder()
    asked = {"decoder": decoder, "draft_model": decoder, "draft_keys": 128, "acceptance": acceptance}
    with harness(speculation="model", **asked) as made:  # type: ignore[arg-type]
        assert made.answer(prompt(12), params).token_ids == reference_ids(decoder, prompt(12), params)
        assert made.engine.status().num_steps == 1 + 6


def test_only_tokens_that_drafts_attend_to_are_run() -> None:
    """The first 3 and the latest 6 of a prompt's 90 tokens; then one token for each draft, and at times one more."""
    run: list[int] = []
    small = WatchedDecoder(SMALL, lambda token_ids, _: run.extend(token_ids))
    with harness(num_slots=8, max_slot_tokens=256) as made:
        row = rows_of(made)[-1]
        proposer = ModelProposer(small, KEYS, 1, PoisonedMemory)
        proposer.prepare([row])
        assert len(run) == 3 + 6
        (draft,) = proposer.draft([DraftRequest(row, 4)])
        assert len(run) == 3 + 6 + 4
        for token_id in (*draft.token_ids, 7):
            row.accept(SampledToken(token_id), 0)
        proposer.prepare([row])
        proposer.draft([DraftRequest(row, 2)])
        assert len(run) == 3 + 6 + 4 + 1 + 2
        proposer.forget(row)
        proposer.forget(row)
        proposer.prepare([row])  # as after a preemption
        assert len(run) == 3 + 6 + 4 + 1 + 2 + 3 + 6
        made.engine.close()


def test_kv_of_drafts_does_not_grow_with_the_row_and_goes_with_it() -> None:
    params = dataclasses.replace(PARAMS, max_tokens=200)
    with harness(speculation="model", max_slot_tokens=512, draft_keys=16) as made:
        stream_id, _ = made.submit(prompt(300), params)
        most = 0
        while made.engine.status().num_steps < 40:
            made.engine.step()
            most = max(most, *draft_kv_of(made.engine))
        assert 0 < most <= page_bytes(DraftKeys.of(16, 8).num_places, SMALL.layout)
        made.engine.cancel(stream_id)
        made.engine.step()
        assert draft_kv_of(made.engine) == [0]


def test_a_draft_model_of_fewer_positions_drafts_up_to_their_end() -> None:
    small = random_decoder(num_layers=1, num_heads=2, num_kv_heads=1, seed=9, max_position=40)
    with harness(speculation="model", draft_model=small) as made:
        params = dataclasses.replace(PARAMS, max_tokens=60)
        assert made.answer(prompt(30), params).token_ids == reference_ids(made.decoder, prompt(30), params)
        stats = made.engine.status().speculation
        assert stats is not None
        assert stats.num_drafted > 0 and stats.num_drafts == 0


def test_numbers_of_drafts_that_are_planned_change_no_text() -> None:
    params = dataclasses.replace(PARAMS, max_tokens=60)
    with harness(speculation="model", draft_tokens=0, draft_keys=32, clock=SystemClock()) as made:
        streams = [made.submit(prompt(length), params)[1] for length in LENGTHS[:4]]
        made.run()
        for length, stream in zip(LENGTHS, streams, strict=False):
            assert stream.token_ids == reference_ids(made.decoder, prompt(length), params)


class RecordingPolicy(ChunkedPrefillPolicy):
    """A scheduling policy that keeps the latest step's plan."""

    latest = StepPlan(())

    def took(self, plan: StepPlan, seconds: float) -> None:
        self.latest = plan


class TickingClock(ManualClock):
    """A clock of which every reading is a second later."""

    def now_s(self) -> float:
        self.advance(1.0)
        return super().now_s()


@pytest.mark.parametrize("clock", [ManualClock(), TickingClock()], ids=["still", "ticking"])
def test_its_steps_are_predicted_and_learnt_by_costs_of_its_own(clock: ManualClock) -> None:
    """Of the model itself the costs are given. By a clock that stands still nothing is learnt; by one that ticks, that
    drafting takes a second."""
    cost = WorkCost(step_s=1000.0, token_s=10.0, key_s=0.1, pair_s=0.01)
    drafting, verifying = StepWork(3, 3 * 8, 3 * 8, 3), StepWork(4, 31, 4 * 31)
    scheduling_policy = RecordingPolicy(16, bounded(math.inf), PrefillWork())
    with harness(
        speculation="model", draft_keys=8, cost=cost, clock=clock, scheduling_policy=scheduling_policy
    ) as made:
        speculation = made.engine._speculation
        assert isinstance(speculation, Speculator)
        draft_cost = speculation._draft_cost
        known_s = draft_cost.drafting.seconds(drafting)
        assert 0 < known_s < 1
        stream = made.submit(prompt(30), dataclasses.replace(PARAMS, max_tokens=1 + 4))[1]
        while not speculation.stats.num_drafts:
            made.engine.step()
        assert speculation.stats.num_draft_weight_bytes == 3 * speculation._draft_bytes[1] > 0
        assert speculation.stats.predicted_s == pytest.approx(cost.seconds(verifying) + known_s, rel=1e-12)
        took_s = 1.0 if isinstance(clock, TickingClock) else 0.0
        decoding = scheduling_policy.latest.decoding
        assert (decoding.work, decoding.draft_s) == (verifying, took_s)
        assert draft_cost.drafting.seconds(drafting) == pytest.approx(took_s or known_s)
        made.run(stream)


def test_a_model_with_sliding_windows_may_have_another_draft_for_it() -> None:
    decoder, params = random_decoder(window=12), dataclasses.replace(PARAMS, max_tokens=30)
    with harness(decoder=decoder, speculation="model") as made:
        assert made.answer(prompt(30), params).token_ids == reference_ids(decoder, prompt(30), params)


def test_one_with_sliding_windows_is_refused() -> None:
    small = random_decoder(window=12)
    with (
        pytest.raises(ConfigError, match="draft_model = 'another' has sliding windows.*: use another"),
        harness(speculation="model", draft_model=small),
    ):
        pass


def test_its_weights_and_its_kv_come_off_the_limits() -> None:
    decoder, keys = eos_decoder(), DraftKeys.of(64, 8)
    weights = weight_bytes(decoder.weights) + weight_bytes(SMALL.weights)
    kv_bytes = 3 * page_bytes(keys.num_places, SMALL.layout)
    settings = {"num_slots": 3, "max_slot_tokens": 400, "speculation": "model", "draft_model": "a", "draft_keys": 64}
    config = EngineConfig(kv_memory_bytes=1 << 20, device_memory_bytes=weights + kv_bytes + 50_000, **settings)  # type: ignore[arg-type]
    limits = make_memory(decoder, config, draft_model=SMALL).limits
    assert (limits.kv_bytes, limits.device_bytes) == ((1 << 20) - kv_bytes, 50_000)
    refusals = {
        "kv_memory_bytes": (kv_bytes, f"the KV of drafts takes {kv_bytes}, use more, or fewer draft_keys"),
        "device_memory_bytes": (
            weights + kv_bytes,
            f"weights take {weights} and the KV of drafts {kv_bytes}, use more",
        ),
    }
    for field, (value, text) in refusals.items():
        few = EngineConfig(**{field: value}, **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{field} = {value} is out of range: {text}"):
            make_memory(decoder, few, draft_model=SMALL)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"speculation": "model"}, "draft_model is empty: name a smaller model"),
        ({"draft_model": "tiny"}, "draft_model = 'tiny' means nothing to speculation auto: use speculation model"),
        ({"draft_model": "tiny", "speculation": "off"}, "means nothing to speculation off"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**settings)  # type: ignore[arg-type]


def load(folder: Path, draft_folder: Path) -> Decoder | None:
    place = WorkerPlace(dtype="float32", model_folder=folder)
    config = EngineConfig(speculation="model", draft_model=str(draft_folder))
    return _load_draft_model(place, config, load_decoder(folder), Tokenizer.load(folder))


def padded(tensor: Tensor) -> Tensor:
    """A matrix with a row for each token gets three more."""
    return torch.cat([tensor, tensor[:3]]) if len(tensor) == VOCAB_SIZE else tensor


def test_a_draft_model_must_have_the_model_s_tokens(cache: Path, tmp_path: Path) -> None:
    model, small, other, larger = (tmp_path / name for name in ("model", "small", "other", "larger"))
    for seed, folder in enumerate((model, small, other)):
        folder.mkdir()
        write_letter_model(folder, seed)
    loaded = load(model, small)
    assert loaded is not None
    assert loaded.layout != load_decoder(model).layout
    text = (other / "tokenizer.json").read_text()
    swapped = text.replace('"A": 33', '"A": 34').replace('"B": 34', '"B": 33', 1)
    assert swapped != text
    (other / "tokenizer.json").write_text(swapped)
    with pytest.raises(ConfigError, match=f"draft_model {other} and the model {model} have different tokenizers: use"):
        load(model, other)
    with pytest.raises(ModelError, match="larger: is not a model folder"):
        load(model, larger)
    shutil.copytree(small, larger)
    tensors = load_file(larger / "model.safetensors")
    save_file({name: padded(tensor) for name, tensor in tensors.items()}, larger / "model.safetensors")
    config = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE + 3}))
    with pytest.raises(ConfigError, match=f"{larger} and the model {model} have vocabularies of 100 and 97 tokens"):
        load(model, larger)

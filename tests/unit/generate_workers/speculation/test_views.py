"""All views whose drafts choose keys attend to the chosen keys and nothing else, and change no text."""

from functools import partial
from pathlib import Path

import pytest

from baton.errors import ConfigError, ModelError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.sparse.selection_file import save_prepared
from baton.sampling_params import SamplingParams
from baton_lab.comparators.drafts import CHOOSING
from generate_workers.config import EngineConfig
from generate_workers.engine.memory_limits import make_memory
from generate_workers.residency.sparse.draft_index import IndexedResidency
from generate_workers.speculation.port import DraftRequest
from generate_workers.speculation.self_drafts import SelfProposer
from tests.support.engines.devices import on_emulated
from tests.support.engines.draft_views import (
    DECODER,
    VIEWS,
    Watching,
    decoding,
    lists_of,
    make_view,
    residency_of,
)
from tests.support.engines.generation import harness, prompt
from tests.support.engines.infinigen import ALL, prepared
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder
from tests.unit.generate_workers.speculation.test_rounds import PARAMS, answers, prompts, steps_for

views = pytest.mark.parametrize("name", [pytest.param(name, marks=needs_rows) for name in VIEWS])
LENGTHS = (70, 9, 41)
NUM_DRAFTS = (5, 2, 4)


def test_the_views_are_all_that_are_made_by_name() -> None:
    assert set(VIEWS) == set(CHOOSING)


def drafted(
    name: str, num_keys: int, *, poison: bool = False, decoder: Decoder = DECODER
) -> tuple[list[list[int]], Watching]:
    """Drafts of rows of uneven lengths and numbers of drafts, and what the draft steps attended to."""
    with decoding([prompt(length) for length in LENGTHS], decoder=decoder) as (made, rows):
        watching = Watching(make_view(name, made, num_keys), residency_of(made), poison)
        draft_requests = [DraftRequest(row, num) for row, num in zip(rows, NUM_DRAFTS, strict=True)]
        return [draft.token_ids for draft in SelfProposer(made.decoder, watching, [24]).draft(draft_requests)], watching


@views
def test_nothing_but_the_chosen_keys_is_read(name: str) -> None:
    as_they_are, watching = drafted(name, 24)
    assert drafted(name, 24, poison=True)[0] == as_they_are
    assert tuple(map(len, as_they_are)) == NUM_DRAFTS
    num_read = [len(keys) for step in watching.found for picks in step.values() if picks for keys in lists_of(picks)[0]]
    assert 0 < max(num_read) <= 24 + max(NUM_DRAFTS) - 1


@views
def test_on_a_device_with_memory_of_its_own_the_same_is_chosen(name: str) -> None:
    expected, at_home = drafted(name, 24)
    found, watching = drafted(name, 24, decoder=on_emulated(DECODER))
    assert found == expected
    for step, other in zip(watching.found, at_home.found, strict=True):
        assert [picks and lists_of(picks) for picks in step.values()] == [
            picks and lists_of(picks) for picks in other.values()
        ]


@views
def test_a_drafter_drafts_over_what_its_view_chose(name: str) -> None:
    expected, _ = drafted(name, 24)
    with decoding([prompt(length) for length in LENGTHS]) as (made, rows):
        draft_requests = [DraftRequest(row, num) for row, num in zip(rows, NUM_DRAFTS, strict=True)]
        assert [
            draft.token_ids
            for draft in SelfProposer(made.decoder, make_view(name, made, 24), [24]).draft(draft_requests)
        ] == expected
        plain = SelfProposer(made.decoder, make_view(name, made, 10_000), [24]).draft(draft_requests)
    assert name == "infinigen" or [draft.token_ids for draft in plain] != expected  # so it matters what is chosen


@views
def test_a_new_token_attends_to_itself_and_keys_ascend(name: str) -> None:
    _, watching = drafted(name, 24)
    assert len(watching.found) == max(NUM_DRAFTS)
    for index, step in enumerate(watching.found):
        lasts = [length + index for length, num in zip(LENGTHS, NUM_DRAFTS, strict=True) if num > index]
        found = [lists_of(picks) for picks in step.values() if picks is not None]
        assert found
        for rows in found:
            assert [[keys[-1] for keys in heads] for heads in rows] == [[last, last] for last in lasts]
            assert all(keys == sorted(set(keys)) for heads in rows for keys in heads)


@views
def test_texts_of_a_ragged_batch_are_those_of_plain_steps(name: str) -> None:
    params = list(PARAMS.values())
    asked = [(ids, params[index % len(params)]) for index, ids in enumerate(prompts(5))]
    plain, plain_logprobs = answers(asked, "off", decoder=DECODER)
    for decoder in (DECODER, on_emulated(DECODER)):
        said, logprobs = answers(asked, name, decoder=decoder)
        assert said == plain
        assert logprobs == pytest.approx(plain_logprobs, abs=1e-4)


@views
def test_models_whose_layers_are_all_whole_are_drafted_for(name: str) -> None:
    decoder, asked = random_decoder(num_layers=1), [(list(prompt(50)), PARAMS["greedy"])]
    assert answers(asked, name, decoder=decoder)[0] == answers(asked, "off", decoder=decoder)[0]


@views
def test_drafts_over_as_many_keys_as_there_are_are_all_accepted(name: str) -> None:
    """One token by the step that prefills, then rounds of one and three drafts."""
    params = SamplingParams(max_tokens=1 + 4 * 6, temperature=0.8, seed=3, ignore_eos=True)
    policy = partial(IndexedResidency, prepared=prepared(ALL, decoder=DECODER))
    with harness(decoder=DECODER, policy=policy, speculation=name, draft_keys=128) as made:
        assert steps_for(made, list(prompt(40)), params) == 3 + 6


@needs_rows
@pytest.mark.parametrize(("name", "kept"), [("snapkv", "_selected"), ("quest", "_pages")])
def test_nothing_is_kept_of_rows_that_have_ended(name: str, kept: str) -> None:
    with harness(decoder=DECODER, speculation=name) as made:
        made.submit(prompt(50), SamplingParams(max_tokens=12, ignore_eos=True))
        view = made.engine._speculation._sources[name].proposer._view  # type: ignore[union-attr]
        for _ in range(6):
            made.engine.step()
        assert len(getattr(view, kept)) == 1
        made.run()
        assert getattr(view, kept) == {}


@views
def test_kv_at_home_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="use residency device"), harness(speculation=name, policy="host"):
        pass


@views
def test_models_with_sliding_windows_are_refused_by_views(name: str) -> None:
    decoder = random_decoder(window=12)
    with (
        pytest.raises(ConfigError, match=f"'{name}' is not supported for models with sliding windows: use speculation"),
        harness(decoder=decoder, speculation=name),
    ):
        pass


def test_infinigen_needs_a_prepared_file(tmp_path: Path) -> None:
    config = EngineConfig(num_slots=1, speculation="infinigen", selection_file=str(tmp_path / "selection"))
    with pytest.raises(ModelError, match="run `baton prepare`"):
        make_memory(DECODER, config)
    with pytest.raises(ConfigError, match="speculation = 'infinigen' is not supported for models with sliding windows"):
        make_memory(random_decoder(window=12), config)


@needs_rows
def test_its_partial_keys_count_as_the_device_s(tmp_path: Path) -> None:
    path = tmp_path / "selection"
    save_prepared(prepared(decoder=DECODER), path)
    config = EngineConfig(num_slots=1, speculation="infinigen", selection_file=str(path))
    residency = make_memory(DECODER, config).residency
    plain = make_memory(DECODER, EngineConfig(num_slots=1, speculation="snapkv")).residency
    assert isinstance(residency, IndexedResidency)
    taken, plainly = residency.bytes_for(1000), plain.bytes_for(1000)
    assert taken.home == plainly.home == plainly.device
    assert taken.device - plainly.device == residency.indices[0].bytes_for(1000) > 0
    with decoding([prompt(60)]) as (made, rows):
        before = made.slots.ledger().num_device_bytes
        SelfProposer(made.decoder, make_view("infinigen", made, 16), [24]).draft([DraftRequest(rows[0], 3)])
        assert made.slots.ledger().num_device_bytes > before

"""Answers are stored while their rows hold their slots: whole blocks, right bytes, and nothing of what is given up."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from baton.modeling.prefix_store.store import Filled, PrefixStore
from baton.prefix_blocks import BlockNaming, PromptBlocks
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, RequestId, StreamNumber, TokenRange
from generate_workers.engine.rows import GenerationRequest, StreamId
from generate_workers.prefixes import answer_saving
from generate_workers.prefixes.answer_saving import StreamAnswers
from generate_workers.slots.kv_memory import MemoryLimits
from generate_workers.slots.slot_access import SlotReader
from generate_workers.streams.open_streams import OpenStreams
from tests.support.engines.chains import until
from tests.support.engines.generation import WAIT_S, Collector, Harness, eos_decoder, harness, prefilled, prompt
from tests.support.engines.prefixes import PLENTY, blocks_in, file_bytes, on_disk, store_in
from tests.support.engines.slot_tables import is_empty, page_bytes

BLOCK = 8
DECODER = eos_decoder()
NAMING = BlockNaming(BLOCK, "salt")
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
ASKED = prompt(15)


@dataclass
class Saved:
    """One stream, and the last that was said of it."""

    made: Harness
    stream_id: StreamId
    events: Collector
    answers: StreamAnswers
    filled: list[Filled] = field(default_factory=list)

    def cancel(self) -> None:
        """Cancel the stream as `OpenStreams.end` does, and run a step."""
        self.made.engine.cancel(self.stream_id)
        self.answers.cancel()
        self.made.engine.step()

    def until_told(self) -> Filled:
        """Steps until the engine has said what was stored."""

        def told() -> bool:
            self.made.engine.step()
            return bool(self.filled)

        until(told)
        [filled] = self.filled
        return filled


def ask(made: Harness, params: SamplingParams = PARAMS, naming: BlockNaming = NAMING) -> Saved:
    events, filled = Collector(num_choices=params.n), list[Filled]()
    assert made.saver is not None
    answers = StreamAnswers(made.saver, naming, filled.append)
    stream_id = made.engine.submit(GenerationRequest(RequestId("r"), ASKED, (), params), events, answers)
    made.streams.append(events)
    return Saved(made, stream_id, events, answers, filled)


@contextmanager
def storing(
    folder: Path, *, limit_bytes: int = PLENTY, policy: str = "device"
) -> Iterator[tuple[Harness, PrefixStore]]:
    store = store_in(folder, DECODER.layout, limit_bytes=limit_bytes)
    with harness(decoder=DECODER, store=store, policy=policy) as made:
        yield made, store


def names(token_ids: tuple[int, ...]) -> tuple[str, ...]:
    return PromptBlocks.of(token_ids, BLOCK, DECODER.layout.fingerprint, NAMING.salt).names


@pytest.mark.parametrize("policy", ["device", "host"])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_what_is_stored_is_the_kv_of_prompt_and_output(folder: Path, policy: str, num_choices: int) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.5, seed=3, ignore_eos=True, n=num_choices)
    with storing(folder, policy=policy) as (made, store):
        asked = ask(made, params)
        filled = asked.until_told()
        expected: list[str] = []
        for choice in range(num_choices):
            known = (*ASKED, *asked.events.choice(choice).token_ids)[:-1]
            buffer, _ = prefilled(DECODER, known)
            blocks = store.open(names(known), BLOCK)
            assert len(blocks) == 3
            for block in blocks:
                torch.testing.assert_close(block.data, buffer.data[:, block.tokens.start : block.tokens.end])
            expected += names(known)
            del blocks, block
        assert filled == Filled(tuple(dict.fromkeys(expected)), ())
        assert blocks_in(folder) == set(expected)


def test_blocks_that_follow_each_other_are_copied_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block of five is there already, and two blocks are the most at once."""
    monkeypatch.setattr(answer_saving, "_MOST_TOKENS", 2 * BLOCK)
    copied: list[TokenRange] = []

    def export(reader: SlotReader, layer: int, tokens: TokenRange) -> memoryview:
        if not layer:
            copied.append(tokens)
        return exported(reader, layer, tokens)

    exported = SlotReader.export
    params = SamplingParams(max_tokens=26, ignore_eos=True)
    with storing(folder) as (made, store):
        asked = ask(made, params)
        asked.until_told()
        known = (*ASKED, *asked.events.choice(0).token_ids)[:-1]
        for at, name in enumerate(names(known)):
            if at != 1:
                (folder / name).unlink()
        monkeypatch.setattr(SlotReader, "export", export)
        ask(made, params).until_told()
        assert copied == [TokenRange(0, 8), TokenRange(16, 32), TokenRange(32, 40)]
        buffer, _ = prefilled(DECODER, known)
        for block in store.open(names(known), BLOCK):
            torch.testing.assert_close(block.data, buffer.data[:, block.tokens.start : block.tokens.end])
        del block


def test_an_answer_without_a_last_whole_block_stores_what_it_has(folder: Path) -> None:
    with storing(folder) as (made, _):
        asked = ask(made, SamplingParams(max_tokens=9, ignore_eos=True))
        assert asked.until_told().stored == names((*ASKED, *asked.events.token_ids[:-1]))[:2]


def test_a_slot_is_held_while_its_answer_is_stored(folder: Path) -> None:
    with storing(folder) as (made, store):
        with store.locked():  # nobody has room meanwhile
            asked = ask(made)
            made.run(asked.events)
            made.engine.step()
            ledger = made.slots.ledger()
            assert (ledger.num_active, ledger.num_quarantined, ledger.imbalance) == (1, 0, "")
            assert (asked.filled, asked.answers.num_held) == ([], 1)
            assert made.engine.status().num_streams == 0  # the engine is done with it
        assert len(asked.until_told().stored) == 3
        assert (is_empty(made.slots.ledger()), asked.answers.num_held) == (True, 0)


def test_others_run_while_an_answer_is_stored(folder: Path) -> None:
    with storing(folder) as (made, store):
        with store.locked():
            made.run(ask(made).events)
            assert made.answer(prompt(9, seed=3), PARAMS).finish is FinishReason.LENGTH
        while not is_empty(made.slots.ledger()):
            made.engine.step()


def test_a_cancelled_stream_stores_nothing(folder: Path) -> None:
    with storing(folder) as (made, store):
        with store.locked():
            asked = ask(made)
            made.run(asked.events)
            asked.cancel()
            ledger = made.slots.ledger()
            assert (ledger.num_active, ledger.imbalance) == (0, "")
            assert ledger.num_quarantined <= 1  # for as long as what was begun looks into its slot
            assert asked.filled == [Filled()]
        until(lambda: is_empty(made.slots.ledger()))
        assert not blocks_in(folder)
        assert asked.events.finish is FinishReason.LENGTH


def test_an_answer_that_waits_for_others_frees_its_slot_when_it_is_cancelled(folder: Path) -> None:
    with storing(folder) as (made, store):
        with store.locked():
            first = ask(made)
            made.run(first.events)
            until(lambda: not waiting(made))  # it has begun
            second = ask(made)
            made.run(second.events)
            assert (made.slots.ledger().num_active, waiting(made)) == (2, 1)
            assert second.answers.num_held == 1
            second.cancel()
            ledger = made.slots.ledger()
            assert (ledger.num_active, ledger.num_quarantined, waiting(made)) == (1, 0, 0)
            assert (second.filled, second.answers.num_held) == ([Filled()], 0)
        assert len(first.until_told().stored) == 3


async def test_a_stream_that_is_ended_frees_the_slot_of_an_answer_that_waits_for_others(folder: Path) -> None:
    with storing(folder) as (made, store):
        streams = OpenStreams(made.engine, made.saver)
        with store.locked():
            first = ask(made)
            made.run(first.events)
            until(lambda: not waiting(made))  # it has begun
            stream = streams.open(
                GenerationRequest(RequestId("r"), ASKED, (), PARAMS), StreamNumber(1), 60.0, lambda: None, NAMING
            )
            while stream.num_open:
                made.engine.step()
                await asyncio.sleep(0)
            assert (stream.num_slots, stream.is_over) == (1, False)
            streams.end(stream)
            await asyncio.sleep(0)
            assert (stream.num_slots, stream.filled) == (0, Filled())
        assert len(first.until_told().stored) == 3


def test_a_saver_outlives_unexpected_errors(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = threading.Event()

    def fail(*_: object) -> None:
        reached.set()
        raise RuntimeError("unheard of")

    below = store_in(tmp_path, DECODER.layout)
    store = store_in(folder, DECODER.layout)
    store.below = on_disk(below)
    monkeypatch.setattr(store, "sink", fail)
    with harness(decoder=DECODER, store=store) as made:
        for _ in range(2):
            assert len(ask(made).until_told().stored) == 3
        assert reached.wait(WAIT_S)
        assert len(ask(made).until_told().stored) == 3


def test_the_disk_delays_no_slot(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, store = threading.Event(), store_in(folder, DECODER.layout)
    store.below = on_disk(store_in(tmp_path, DECODER.layout))
    monkeypatch.setattr(store, "sink", lambda *_: opened.wait(2 * WAIT_S))
    with harness(decoder=DECODER, store=store) as made:
        try:
            for salt in ("a", "b"):
                assert len(ask(made, naming=BlockNaming(BLOCK, salt)).until_told().stored) == 3
            assert is_empty(made.slots.ledger())
        finally:
            opened.set()


def test_a_saver_whose_thread_is_gone_takes_nothing(folder: Path) -> None:
    with storing(folder) as (made, _):
        assert made.saver is not None
        made.saver.close()
        assert ask(made).until_told() == Filled()


def test_what_is_stored_gives_way_before_a_row_that_runs(folder: Path) -> None:
    store = store_in(folder, DECODER.layout)
    limits = MemoryLimits(2 * page_bytes(96, DECODER.layout))
    with harness(decoder=DECODER, store=store, limits=limits, growth_tokens=1) as made:
        with store.locked():
            saved = [ask(made) for _ in range(3)]
            made.run(*(each.events for each in saved))
            until(lambda: waiting(made) == 2)
            answer = made.answer(prompt(10), SamplingParams(max_tokens=110, ignore_eos=True))
            assert answer.finish is FinishReason.LENGTH
            assert made.engine.status().num_preemptions == 0
            assert [each.filled for each in saved] == [[Filled()]] * 3
        until(lambda: is_empty(made.slots.ledger()))


def waiting(made: Harness) -> int:
    """Answers that nobody has begun to store."""
    assert made.saver is not None
    return sum(not saving.running() and not saving.done() for saving in list(made.saver._held.values()))


def test_a_store_without_room_keeps_nothing(folder: Path) -> None:
    with storing(folder, limit_bytes=file_bytes(DECODER.layout, BLOCK) - 1) as (made, _):
        assert ask(made).until_told() == Filled()
        assert not blocks_in(folder)


def test_evicted_blocks_are_reported(folder: Path) -> None:
    with storing(folder, limit_bytes=3 * file_bytes(DECODER.layout, BLOCK)) as (made, store):
        first = ask(made).until_told()
        second = ask(made, naming=BlockNaming(BLOCK, "another")).until_told()
        assert (sorted(second.evicted), len(second.stored)) == (sorted(first.stored), 3)
        assert set(store.names()) == set(second.stored)


def test_a_store_whose_folder_is_gone_fails_no_request(folder: Path) -> None:
    with storing(folder) as (made, _):
        folder.rename(folder.with_name(folder.name + "-gone"))
        try:
            asked = ask(made)
            assert asked.until_told() == Filled()
            assert asked.events.finish is FinishReason.LENGTH
        finally:
            folder.with_name(folder.name + "-gone").rename(folder)


def test_a_stream_that_ends_early_stores_nothing(folder: Path) -> None:
    with storing(folder) as (made, _):
        asked = ask(made, SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(4):
            made.engine.step()
        asked.cancel()
        assert asked.until_told() == Filled()
        assert not blocks_in(folder)


def test_a_saver_that_closes_gives_up_what_is_being_stored(folder: Path) -> None:
    with storing(folder) as (made, store):
        assert made.saver is not None
        with store.locked():
            asked = ask(made)
            made.run(asked.events)
            closing = threading.Thread(target=made.saver.close)
            closing.start()
            until(lambda: bool(asked.filled))
        closing.join()
        assert asked.filled == [Filled()]
        assert is_empty(made.slots.ledger())
        assert not blocks_in(folder)


def test_a_cancelled_stream_hands_over_no_further_row(folder: Path) -> None:
    with storing(folder) as (made, _):
        asked = ask(made)
        made.engine.step()
        asked.answers.cancel()  # the engine has not heard of it when the row gets its last token
        made.run(asked.events)
        assert (asked.filled, is_empty(made.slots.ledger())) == ([Filled()], True)
        assert not blocks_in(folder)


def test_a_row_that_is_released_is_read_no_more(folder: Path) -> None:
    with harness(decoder=DECODER) as made:
        _, events = made.submit(ASKED, SamplingParams(max_tokens=60, ignore_eos=True))
        made.engine.step()
        [row] = made.engine._running.rows.values()
        reader = made.slots.open_read(row.ref)
        assert len(reader.export(0, TokenRange(0, 15))) == 15 * DECODER.layout.row_bytes
        made.engine.cancel(row.stream.stream_id)
        made.engine.step()
        with pytest.raises(Exception, match="is stale"):
            reader.export(0, TokenRange(0, 15))
        assert made.slots.ledger().num_quarantined == 1
        reader.close()
        reader.close()
        assert (is_empty(made.slots.ledger()), events.finish) == (True, FinishReason.CANCELLED)

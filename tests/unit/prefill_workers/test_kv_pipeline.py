"""A piece is passed on exactly when its last row is final, layer after layer, from the memory in which it lies."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.errors import ChainError
from baton.modeling.kv.buffers import KvBuffer, LayerBuffers, byte_view
from baton.types import Epoch, JobId, KvLayout, Rank, RequestId, TokenRange
from prefill_workers import kv_pipeline as pipeline_module
from prefill_workers.job import Job
from prefill_workers.kv_pipeline import KvPipeline, RankKv
from prefill_workers.links import LinkHeader, LinkStatus, Payload
from tests.support.manual_clock import ManualClock

LAYOUT = KvLayout("model", 2, 1, 2, "float32")
CHUNKS = (TokenRange(3, 5), TokenRange(5, 6), TokenRange(6, 9))
Sent = list[tuple[Rank, LinkHeader, Payload | None]]


class Place:
    """One rank's pipeline, its memory, and what it sends."""

    def __init__(self, place: int, chunks: tuple[TokenRange, ...] = CHUNKS, layout: KvLayout = LAYOUT) -> None:
        ranks = (Rank(0), Rank(2), Rank(3))
        start, end = chunks[0].start, chunks[-1].end
        job = Job(
            JobId(7),
            Epoch(2),
            RequestId("r"),
            1,
            ranks,
            chunks,
            range(end),
            prefix=(KvBuffer(layout, TokenRange(0, start)),),
        )
        self.layout = layout
        self.own_kv = KvBuffer(layout, chunks[place])
        self.buffers: list[KvBuffer] = []
        """Made for layers of earlier tokens."""
        self.earlier_kv = LayerBuffers(layout, TokenRange(start, chunks[place].start), self._make_buffer)
        self.sent: Sent = []
        self.clock = ManualClock()
        self.pipeline = KvPipeline(
            RankKv(job, ranks[place], self.own_kv, self.earlier_kv),
            clock=self.clock,
            lock=threading.Condition(),
            send=lambda *message: self.sent.append(message),
        )

    def _make_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        self.buffers.append(KvBuffer(layout, tokens))
        return self.buffers[-1]

    def header(self, layer: int, tokens: TokenRange = CHUNKS[0]) -> LinkHeader:
        num_bytes = len(tokens) * self.layout.row_bytes
        return LinkHeader(Epoch(2), JobId(7), layer, tokens, LinkStatus.DATA, num_bytes)

    def receive(self, layer: int, tokens: TokenRange = CHUNKS[0], fill: bytes = b"\1") -> None:
        """A whole message from the rank in front."""
        assert self.pipeline.source is not None
        place = self.pipeline.place(self.pipeline.source, self.header(layer, tokens))
        assert isinstance(place, memoryview)
        place[:] = fill * place.nbytes
        self.pipeline.received(self.header(layer, tokens))

    def has_sent(self) -> list[tuple[int, TokenRange]]:
        return [(header.layer, header.tokens) for _, header, _ in self.sent]


def test_neighbours_are_those_of_the_job() -> None:
    neighbours = [(place.pipeline.source, place.pipeline.target) for place in map(Place, range(3))]
    assert neighbours == [(None, 2), (0, 3), (2, None)]


def test_first_rank_passes_on_what_it_projects() -> None:
    first = Place(0)
    first.pipeline.projected()
    ((target, header, _),) = first.sent
    assert (target, header) == (2, first.header(0, TokenRange(3, 5)))


def test_pieces_of_a_layer_leave_in_the_order_in_which_they_become_final() -> None:
    received_first, projected_first = Place(1), Place(1)
    received_first.receive(0)
    assert received_first.has_sent() == [(0, CHUNKS[0])]
    received_first.pipeline.projected()
    assert received_first.has_sent() == [(0, CHUNKS[0]), (0, CHUNKS[1])]
    projected_first.pipeline.projected()
    assert projected_first.has_sent() == [(0, CHUNKS[1])]
    projected_first.receive(0)
    assert projected_first.has_sent() == [(0, CHUNKS[1]), (0, CHUNKS[0])]


def test_layers_that_came_early_leave_after_all_of_the_layers_before_them() -> None:
    middle = Place(1)
    middle.receive(0)
    middle.receive(1)
    assert middle.has_sent() == [(0, CHUNKS[0])]
    middle.pipeline.projected()
    assert middle.has_sent() == [(0, CHUNKS[0]), (0, CHUNKS[1]), (1, CHUNKS[0])]
    middle.pipeline.projected()
    assert middle.has_sent()[3:] == [(1, CHUNKS[1])]


def test_long_chunks_travel_in_pieces_where_they_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "PIECE_TOKENS", 2)
    middle = Place(1, (TokenRange(3, 6), TokenRange(6, 10), TokenRange(10, 11)))
    pieces = [TokenRange(3, 5), TokenRange(5, 6)]
    for piece in pieces:
        assert not middle.pipeline.has_received(0)
        middle.receive(0, piece)
        assert middle.has_sent()[-1] == (0, piece)
    assert middle.pipeline.has_received(0)
    middle.pipeline.projected()
    assert middle.has_sent() == [(0, piece) for piece in [*pieces, TokenRange(6, 10)]]


def test_pieces_of_a_layer_may_come_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "PIECE_TOKENS", 1)
    middle = Place(1)
    middle.receive(0, TokenRange(4, 5), b"\2")
    middle.receive(0, TokenRange(3, 4), b"\3")
    assert middle.pipeline.has_received(0)
    rows = middle.earlier_kv.span(0, TokenRange(3, 5)).flatten().numpy().tobytes()
    assert rows == b"\3" * LAYOUT.row_bytes + b"\2" * LAYOUT.row_bytes


def test_last_rank_passes_nothing_on() -> None:
    last = Place(2)
    for layer in range(2):
        last.receive(layer, CHUNKS[1])
        last.receive(layer, CHUNKS[0])
        last.pipeline.projected()
    assert last.sent == []
    assert last.pipeline.done


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_passed_on_is_the_memory_itself(place: int) -> None:
    rank = Place(place)
    if place == 0:
        rank.pipeline.projected()
        memory = rank.own_kv.span(0, CHUNKS[0])
    else:
        rank.receive(0)
        memory = rank.earlier_kv.span(0, CHUNKS[0])
    memory.fill_(2.0)
    payload = rank.sent[0][2]
    assert payload is not None
    assert bytes(payload) == memory.numpy().tobytes()


def test_counts_the_time_that_messages_are_on_their_way_and_not_what_they_wait_for_each_other() -> None:
    first = Place(0)
    first.pipeline.projected()
    first.pipeline.projected()
    for (_, header, _), seconds in zip(first.sent, (0.5, 0.25), strict=True):
        first.clock.advance(seconds)
        first.pipeline.sent(header)
    assert (first.pipeline.num_sent, first.pipeline.send_s) == (2, 0.75)


def test_done_when_all_has_left() -> None:
    middle = Place(1)
    for layer in range(2):
        middle.receive(layer)
        middle.pipeline.projected()
    for _, header, _ in middle.sent:
        assert not middle.pipeline.done
        middle.pipeline.sent(header)
    assert middle.pipeline.done
    assert middle.pipeline.num_bytes_sent == 2 * 3 * LAYOUT.row_bytes


@pytest.mark.parametrize(
    ("source", "layer", "tokens"),
    [(3, 0, (3, 5)), (0, 1, (3, 5)), (0, 0, (3, 6)), (0, 0, (0, 5)), (0, 0, (3, 4)), (0, 0, (5, 6))],
)
def test_unexpected_message_has_no_place(source: int, layer: int, tokens: tuple[int, int]) -> None:
    middle = Place(1)
    with pytest.raises(ChainError, match="give all ranks the same job"):
        middle.pipeline.place(Rank(source), middle.header(layer, TokenRange(*tokens)))


def test_piece_has_a_place_once() -> None:
    last = Place(2)
    last.receive(0, CHUNKS[0])
    with pytest.raises(ChainError, match="give all ranks the same job"):
        last.receive(0, CHUNKS[0])


def test_no_place_beyond_the_last_layer() -> None:
    middle = Place(1)
    middle.receive(0)
    middle.receive(1)
    with pytest.raises(ChainError):
        middle.receive(2)


def test_no_memory_for_a_layer_is_the_chain_s_error() -> None:
    def fail(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        raise MemoryError

    middle = Place(1)
    middle.pipeline.kv = replace(middle.pipeline.kv, earlier=LayerBuffers(LAYOUT, CHUNKS[0], fail))
    with pytest.raises(ChainError, match="no memory for layer 0: retry later"):
        middle.receive(0)


# Memory of layers on their way.

DEEP = KvLayout("model", 9, 1, 2, "float32")


def test_memory_of_a_layer_that_was_attended_to_and_sent_serves_the_next() -> None:
    middle = Place(1, layout=DEEP)
    for layer in range(9):
        middle.receive(layer)
        middle.pipeline.projected()
        middle.pipeline.attended(layer)
        for _, header, _ in middle.sent:
            middle.pipeline.sent(header)
        middle.sent.clear()
    assert len(middle.buffers) == 1


@pytest.mark.parametrize("missing", ["attended", "sent"])
def test_memory_of_a_layer_stays_while_somebody_needs_it(missing: str) -> None:
    middle = Place(1, layout=DEEP)
    middle.receive(0)
    middle.pipeline.projected()
    if missing == "sent":
        middle.pipeline.attended(0)
    else:
        for _, header, _ in middle.sent:
            middle.pipeline.sent(header)
    middle.receive(1, fill=b"\7")
    assert len(middle.buffers) == 2
    assert middle.earlier_kv.span(0, CHUNKS[0]).flatten().numpy().tobytes() == b"\1" * 2 * DEEP.row_bytes


def test_last_rank_needs_a_layer_until_it_was_attended_to() -> None:
    last = Place(2, layout=DEEP)
    for layer in range(9):
        last.receive(layer, CHUNKS[0])
        last.receive(layer, CHUNKS[1])
        last.pipeline.attended(layer)
    assert len(last.buffers) == 1


class Life:
    """A middle rank whose link and engine do what they may in any order; a sent message is read when it leaves."""

    def __init__(self, rng: random.Random) -> None:
        self.chunks = (TokenRange(3, 8), TokenRange(8, 9), TokenRange(9, 12))
        self.rank = Place(1, self.chunks, DEEP)
        self.num_projected = self.num_attended = self.num_left = 0
        self.incoming: list[tuple[int, TokenRange]] = []
        for layer in range(DEEP.num_layers):
            pieces = self.chunks[0].split(2)
            self.incoming += [(layer, piece) for piece in rng.sample(pieces, len(pieces))]

    def actions(self) -> list[Callable[[], None]]:
        may = {
            self.receive: bool(self.incoming),
            self.project: self.num_projected == self.num_attended < DEEP.num_layers,
            self.attend: self.num_projected > self.num_attended and self.rank.pipeline.has_received(self.num_attended),
            self.leave: self.num_left < len(self.rank.sent),
        }
        return [action for action, can in may.items() if can]

    def receive(self) -> None:
        layer, tokens = self.incoming.pop(0)
        self.rank.receive(layer, tokens, self.mark(layer, tokens))

    def project(self) -> None:
        own = self.chunks[1]
        byte_view(self.rank.own_kv.span(self.num_projected, own))[:] = self.rows(self.num_projected, own)
        self.rank.pipeline.projected()
        self.num_projected += 1

    def attend(self) -> None:
        layer = self.num_attended
        rows = self.rank.pipeline.earlier_rows(layer)
        read = torch.stack((rows.k_SGH, rows.v_SGH), 1).numpy().tobytes()
        assert read == b"".join(self.rows(layer, piece) for piece in self.chunks[0].split(2))
        self.rank.pipeline.attended(layer)
        self.num_attended += 1

    def leave(self) -> None:
        _, header, payload = self.rank.sent[self.num_left]
        assert payload is not None
        assert bytes(payload) == self.rows(header.layer, header.tokens)
        self.rank.pipeline.sent(header)
        self.num_left += 1

    def mark(self, layer: int, tokens: TokenRange) -> bytes:
        return bytes([layer * 16 + tokens.start])

    def rows(self, layer: int, tokens: TokenRange) -> bytes:
        return self.mark(layer, tokens) * (len(tokens) * DEEP.row_bytes)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_first_every_piece_leaves_once_and_as_it_was(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(pipeline_module, "PIECE_TOKENS", 2)
    rng = random.Random(seed)
    session = Life(rng)
    while actions := session.actions():
        rng.choice(actions)()
    assert session.rank.pipeline.done
    left = session.rank.has_sent()
    assert [layer for layer, _ in left] == sorted(layer for layer, _ in left)
    pieces = [*session.chunks[0].split(2), session.chunks[1]]
    assert sorted(left) == [(layer, piece) for layer in range(DEEP.num_layers) for piece in pieces]


# Aborts and signs of life.


def test_abort_is_told_once_and_ends_passing_on() -> None:
    first = Place(0)
    first.pipeline.projected()
    first.pipeline.abort()
    first.pipeline.abort()
    first.pipeline.projected()
    first.pipeline.alive()
    assert [header.status for _, header, _ in first.sent] == [LinkStatus.DATA, LinkStatus.ABORT]


def test_abort_is_told_while_a_piece_of_the_last_layer_is_missing() -> None:
    middle = Place(1)
    middle.receive(0)
    middle.receive(1)
    middle.pipeline.projected()
    middle.pipeline.abort()
    assert middle.sent[-1][1].status is LinkStatus.ABORT


def test_abort_is_not_told_when_all_was_passed_on() -> None:
    first = Place(0)
    first.pipeline.projected()
    first.pipeline.projected()
    first.pipeline.abort()
    assert [header.status for _, header, _ in first.sent] == [LinkStatus.DATA] * 2


def test_alive_has_no_payload() -> None:
    first = Place(0)
    first.pipeline.alive()
    assert first.sent == [(Rank(2), LinkHeader.bare(Epoch(2), JobId(7), LinkStatus.ALIVE), None)]

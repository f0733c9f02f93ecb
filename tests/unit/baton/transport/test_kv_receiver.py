import asyncio
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from baton.errors import (
    BatonError,
    ChecksumError,
    IncompletePushError,
    InvalidArgumentError,
    LayoutMismatchError,
    LeaseExpiredError,
    RangeError,
    ResourceExhaustedError,
)
from baton.limits import MAX_MESSAGE_BYTES
from baton.transport.channel import make_channel
from baton.transport.kv_receiver import KvReceiverServicer, _wait_s
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import LeaseRef, TokenRange
from baton.v1 import common_pb2, kv_pb2
from baton.v1.kv_pb2_grpc import KvReceiverStub
from tests.support.manual_clock import ManualClock
from tests.support.wire.kv_loopback import FIRST, LAYOUT, NUM_TOKENS, WHOLE, Loopback, loopback, rows
from tests.support.wire.shared_push import shared_push
from tests.support.wire.spoiled_pieces import REFUSED, Spoil, flip_a_byte

pytestmark = pytest.mark.integration


@pytest.fixture
async def loop() -> AsyncIterator[Loopback]:
    async with loopback() as both_ends:
        yield both_ends


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits answer long before their deadlines."""
    monkeypatch.setattr("baton.transport.kv_receiver._wait_s", lambda context: 0.2)


Push = Callable[[Loopback, Iterable[kv_pb2.KvPiece]], Awaitable[kv_pb2.PushReply]]


async def by_shared_memory(loop: Loopback, pieces: Iterable[kv_pb2.KvPiece]) -> kv_pb2.PushReply:
    async with shared_push(loop) as push:
        assert await push.name()
        if shared := [push.put(piece) for piece in pieces]:
            await push.send(*shared)
        return await push.finish()


by_each_route = pytest.mark.parametrize("push", [Loopback.push, by_shared_memory], ids=["stream", "shared"])


@by_each_route
async def test_pushed_bytes_are_written_in_place(loop: Loopback, push: Push) -> None:
    lease = await loop.reserve()
    await push(loop, [loop.piece(lease.ref, layer=1, tokens=TokenRange(2, 5))])
    assert loop.sink.read(lease.ref, 1, WHOLE) == (
        bytes(2 * LAYOUT.row_bytes) + rows(TokenRange(2, 5)) + bytes(3 * LAYOUT.row_bytes)
    )


@by_each_route
async def test_reply_counts_pieces_bytes_and_duplicates(loop: Loopback, push: Push) -> None:
    lease = await loop.reserve()
    parts = WHOLE.split(3)
    pieces = [loop.piece(lease.ref, layer, part) for layer in (0, 1) for part in parts]
    reply = await push(loop, [*pieces, pieces[0], pieces[4]])
    assert (reply.num_pieces, reply.num_duplicates) == (8, 2)
    assert reply.num_bytes == NUM_TOKENS * LAYOUT.token_bytes + (3 + 3) * LAYOUT.row_bytes


@by_each_route
async def test_empty_push_is_no_error(loop: Loopback, push: Push) -> None:
    assert await push(loop, []) == kv_pb2.PushReply()


@by_each_route
async def test_duplicate_changes_nothing(loop: Loopback, push: Push) -> None:
    lease = await loop.reserve()
    reply = await push(loop, [loop.piece(lease.ref), loop.piece(lease.ref, seed=99)])
    assert reply.num_duplicates == 1
    assert loop.sink.read(lease.ref, 0, WHOLE) == rows(WHOLE)


@by_each_route
@pytest.mark.parametrize(("change", "error"), REFUSED)
async def test_bad_piece_is_refused_and_harms_nothing(
    loop: Loopback, push: Push, change: Spoil, error: type[BatonError]
) -> None:
    lease = await loop.reserve()
    await push(loop, [loop.piece(lease.ref, layer=0)])
    bad = loop.piece(lease.ref, layer=1)
    change(bad)
    with pytest.raises(error) as caught:
        await push(loop, [bad])
    assert type(caught.value) is error
    assert loop.sink.read(lease.ref, 0, WHOLE) == rows(WHOLE, 0)
    assert loop.sink.read(lease.ref, 1, WHOLE) == bytes(len(WHOLE) * LAYOUT.row_bytes)
    await loop.sink.writers_become(lease.ref.slot, 0)


async def test_push_may_go_on_after_a_refused_piece(loop: Loopback) -> None:
    lease = await loop.reserve()
    bad = loop.piece(lease.ref, layer=1)
    flip_a_byte(bad)
    with pytest.raises(ChecksumError):
        await loop.push([loop.piece(lease.ref, layer=0), bad, loop.piece(lease.ref, layer=1)])
    reply = await loop.push([loop.piece(lease.ref, layer=0), loop.piece(lease.ref, layer=1)])
    assert reply.num_duplicates == 1
    assert await loop.client.commit(lease.ref, [FIRST]) == NUM_TOKENS * LAYOUT.token_bytes


@by_each_route
async def test_overlapping_piece_is_refused(loop: Loopback, push: Push) -> None:
    lease = await loop.reserve()
    with pytest.raises(RangeError):
        await push(loop, [loop.piece(lease.ref), loop.piece(lease.ref, tokens=TokenRange(1, 3), seed=99)])
    assert loop.sink.read(lease.ref, 0, WHOLE) == rows(WHOLE)


@by_each_route
async def test_piece_for_another_lease_is_refused_in_the_same_push(push: Push) -> None:
    async with loopback(num_slots=2) as loop:
        lease, other = await loop.reserve(), await loop.reserve()
        with pytest.raises(InvalidArgumentError, match="one push per lease"):
            await push(loop, [loop.piece(lease.ref), loop.piece(other.ref)])
        assert loop.sink.read(other.ref, 0, WHOLE) == bytes(len(WHOLE) * LAYOUT.row_bytes)


@pytest.mark.parametrize("frame", [b"\xff", b"\x0a\x05\x18", bytes(1000)])
async def test_frame_that_is_no_piece_is_refused(loop: Loopback, frame: bytes) -> None:
    lease = await loop.reserve()
    with pytest.raises(InvalidArgumentError, match="is not a KvPiece"):
        await loop.push_bytes([loop.piece(lease.ref).SerializeToString(), frame])
    await loop.sink.writers_become(lease.ref.slot, 0)


async def test_message_over_the_limit_is_refused(loop: Loopback) -> None:
    lease = await loop.reserve()
    unlimited = (("grpc.max_send_message_length", -1),)
    giant = loop.piece(lease.ref)
    giant.payload = bytes(MAX_MESSAGE_BYTES + 1)
    async with grpc.aio.insecure_channel(loop.endpoint, options=unlimited) as channel:
        with pytest.raises(InvalidArgumentError, match="larger than max"), translate_rpc_errors():
            await KvReceiverStub(channel).Push(iter([loop.piece(lease.ref), giant]))
    await loop.sink.writers_become(lease.ref.slot, 0)


async def test_generated_stub_can_push(loop: Loopback) -> None:
    """The codec on the server is a matter of speed: any client that speaks the proto is served."""
    lease = await loop.reserve()
    reply = await KvReceiverStub(loop.channel).Push(iter([loop.piece(lease.ref), loop.piece(lease.ref, layer=1)]))
    assert reply.num_bytes == NUM_TOKENS * LAYOUT.token_bytes


async def test_push_to_an_expired_lease_is_refused() -> None:
    clock = ManualClock()
    async with loopback(clock=clock) as loop:
        lease = await loop.reserve(ttl_s=5)
        clock.advance(6)
        with pytest.raises(LeaseExpiredError):
            await loop.push([loop.piece(lease.ref)])


async def test_lease_that_expires_during_a_push_is_refused() -> None:
    clock, more = ManualClock(), asyncio.Event()
    async with loopback(clock=clock) as loop:
        lease = await loop.reserve(ttl_s=5)

        async def pieces() -> AsyncIterator[kv_pb2.KvPiece]:
            yield loop.piece(lease.ref)
            await more.wait()
            yield loop.piece(lease.ref, layer=1)

        push = asyncio.ensure_future(KvReceiverStub(loop.channel).Push(pieces()))
        await loop.sink.writers_become(lease.ref.slot, 1)
        clock.advance(6)
        more.set()
        with pytest.raises(LeaseExpiredError), translate_rpc_errors():
            await push
        await loop.sink.writers_become(lease.ref.slot, 0)


RESERVE = {"num_tokens": 8, "capacity_tokens": 8, "ttl_s": 5.0, "layout_fingerprint": LAYOUT.fingerprint}


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("num_tokens", 0, InvalidArgumentError),
        ("num_tokens", 9, InvalidArgumentError),
        ("capacity_tokens", 2**32 - 1, InvalidArgumentError),
        ("ttl_s", 0.0, InvalidArgumentError),
        ("ttl_s", -1.0, InvalidArgumentError),
        ("ttl_s", math.nan, InvalidArgumentError),
        ("ttl_s", math.inf, InvalidArgumentError),
        ("layout_fingerprint", "", LayoutMismatchError),
        ("layout_fingerprint", "x" * 100_000, LayoutMismatchError),
        ("prefix_blocks", ["a"], InvalidArgumentError),
        ("prefills_locally", True, InvalidArgumentError),
    ],
)
async def test_bad_reserve_is_refused(loop: Loopback, field: str, value: object, error: type[BatonError]) -> None:
    request = kv_pb2.ReserveRequest(**(RESERVE | {field: value}))  # type: ignore[arg-type]
    with pytest.raises(error), translate_rpc_errors():
        await KvReceiverStub(loop.channel).Reserve(request)


@pytest.mark.parametrize(
    ("num_blocks", "block_tokens", "prefills_locally"), [(1, 9, False), (3, 3, False), (2**20, 1, False), (2, 4, True)]
)
async def test_blocks_beyond_the_tokens_are_refused(
    loop: Loopback, num_blocks: int, block_tokens: int, prefills_locally: bool
) -> None:
    fields = {"prefix_blocks": ["a"] * num_blocks, "block_tokens": block_tokens, "prefills_locally": prefills_locally}
    request = kv_pb2.ReserveRequest(**(RESERVE | fields))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="name whole blocks of the first"), translate_rpc_errors():
        await KvReceiverStub(loop.channel).Reserve(request)


async def test_a_receiver_without_blocks_has_none_present(loop: Loopback) -> None:
    request = kv_pb2.ReserveRequest(**(RESERVE | {"prefix_blocks": ["a", "b"], "block_tokens": 4}))  # type: ignore[arg-type]
    assert (await KvReceiverStub(loop.channel).Reserve(request)).num_present_tokens == 0


async def test_refused_reserve_takes_no_slot(loop: Loopback) -> None:
    with pytest.raises(InvalidArgumentError), translate_rpc_errors():
        await KvReceiverStub(loop.channel).Reserve(kv_pb2.ReserveRequest(**(RESERVE | {"ttl_s": 0.0})))  # type: ignore[arg-type]
    assert (await loop.reserve()).num_tokens == NUM_TOKENS


async def test_renew_refuses_a_bad_ttl(loop: Loopback) -> None:
    lease = await loop.reserve()
    with pytest.raises(InvalidArgumentError, match="ttl_s"):
        await loop.client.renew(lease.ref, math.nan)


@pytest.mark.parametrize(
    ("verb", "request_bytes"),
    [
        ("Renew", kv_pb2.RenewRequest(ttl_s=1).SerializeToString()),
        ("Commit", kv_pb2.CommitRequest(first=[common_pb2.SampledToken(token_id=1)]).SerializeToString()),
        ("Abort", b""),
    ],
)
async def test_verb_without_a_lease_is_refused(loop: Loopback, verb: str, request_bytes: bytes) -> None:
    method = loop.channel.unary_unary(f"/baton.v1.KvReceiver/{verb}", bytes, bytes)
    with pytest.raises(InvalidArgumentError, match="lease"), translate_rpc_errors():
        await method(request_bytes)


async def test_commit_without_a_token_is_refused(loop: Loopback) -> None:
    with pytest.raises(InvalidArgumentError, match="first"), translate_rpc_errors():
        await KvReceiverStub(loop.channel).Commit(kv_pb2.CommitRequest(lease=common_pb2.LeaseRef()))


async def test_commit_answers_before_its_deadline_with_what_is_missing(loop: Loopback, hasty: None) -> None:
    lease = await loop.reserve()
    await loop.push([loop.piece(lease.ref), loop.piece(lease.ref, layer=1, tokens=TokenRange(0, 3))])
    with pytest.raises(IncompletePushError, match=r"layer 1, tokens \[3, 8\)"):
        await loop.client.commit(lease.ref, [FIRST], timeout_s=60)


@pytest.mark.parametrize(("remaining_s", "expected_s"), [(20.0, 19.5), (1.0, 0.75), (None, math.inf)])
def test_a_part_of_a_commits_deadline_is_kept_for_its_answer(remaining_s: float | None, expected_s: float) -> None:
    context = cast(Any, SimpleNamespace(time_remaining=lambda: remaining_s))
    assert _wait_s(context) == expected_s


async def test_push_may_be_finished_after_an_early_commit(loop: Loopback, hasty: None) -> None:
    lease = await loop.reserve()
    await loop.push([loop.piece(lease.ref)])
    with pytest.raises(IncompletePushError):
        await loop.client.commit(lease.ref, [FIRST], timeout_s=60)
    await loop.push([loop.piece(lease.ref, layer=1, seed=5)])
    assert await loop.client.commit(lease.ref, [FIRST]) == NUM_TOKENS * LAYOUT.token_bytes
    assert loop.sink.read(lease.ref, 1, WHOLE) == rows(WHOLE, seed=5)


async def test_commit_waits_for_the_last_byte(loop: Loopback) -> None:
    lease = await loop.reserve()
    await loop.push([loop.piece(lease.ref)])
    commit = asyncio.create_task(loop.client.commit(lease.ref, [FIRST], timeout_s=60))
    done, _ = await asyncio.wait({commit}, timeout=0.1)
    assert not done
    await loop.push([loop.piece(lease.ref, layer=1)])
    assert await commit == NUM_TOKENS * LAYOUT.token_bytes


async def start_push(loop: Loopback, channel: grpc.aio.Channel, ref: LeaseRef) -> "asyncio.Future[kv_pb2.PushReply]":
    """A push that has a writer inside the sink, and does not end by itself."""

    async def pieces() -> AsyncIterator[kv_pb2.KvPiece]:
        yield loop.piece(ref)
        await asyncio.Event().wait()

    push = asyncio.ensure_future(KvReceiverStub(channel).Push(pieces()))
    await loop.sink.writers_become(ref.slot, 1)
    return push


async def test_writer_leaves_when_its_call_is_cancelled(loop: Loopback) -> None:
    lease = await loop.reserve()
    push = await start_push(loop, loop.channel, lease.ref)
    push.cancel()
    await loop.sink.writers_become(lease.ref.slot, 0)


async def test_writer_leaves_when_its_channel_is_closed(loop: Loopback) -> None:
    lease = await loop.reserve()
    async with make_channel(loop.endpoint) as channel:
        push = await start_push(loop, channel, lease.ref)
    await loop.sink.writers_become(lease.ref.slot, 0)
    await asyncio.gather(push, return_exceptions=True)


PUSH_AND_HANG = """
import sys
import grpc
def frames():
    yield bytes.fromhex(sys.argv[2])
    sys.stdin.read()
with grpc.insecure_channel(sys.argv[1]) as channel:
    channel.stream_unary("/baton.v1.KvReceiver/Push", bytes, bytes)(frames())
"""


async def test_writer_leaves_when_its_process_is_killed(loop: Loopback) -> None:
    lease = await loop.reserve()
    frame = loop.piece(lease.ref).SerializeToString().hex()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PUSH_AND_HANG, loop.endpoint, frame, stdin=asyncio.subprocess.PIPE, cwd=Path.cwd()
    )
    try:
        await loop.sink.writers_become(lease.ref.slot, 1)
    finally:
        process.kill()
        await process.wait()
    await loop.sink.writers_become(lease.ref.slot, 0)
    assert loop.sink.read(lease.ref, 0, WHOLE) == rows(WHOLE)


async def test_slot_is_not_leased_again_while_a_writer_is_inside(loop: Loopback) -> None:
    lease = await loop.reserve()
    push = await start_push(loop, loop.channel, lease.ref)
    await loop.client.abort(lease.ref)
    with pytest.raises(ResourceExhaustedError):
        await loop.reserve()
    push.cancel()
    await loop.sink.writers_become(lease.ref.slot, 0)
    assert (await loop.reserve()).ref != lease.ref


def test_servicer_cannot_be_registered_without_its_codec() -> None:
    """The generated registration would parse, and so copy, every payload: it must fail at once."""
    from baton.v1.kv_pb2_grpc import add_KvReceiverServicer_to_server

    with pytest.raises(AttributeError):
        add_KvReceiverServicer_to_server(KvReceiverServicer(None), None)  # type: ignore[arg-type]

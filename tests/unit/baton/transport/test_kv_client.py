"""The lease verbs over a real wire: what the receiver raised is raised here, and the verbs may be repeated."""

import dataclasses
from collections.abc import AsyncIterator

import pytest

from baton.errors import IncompletePushError, LayoutMismatchError, LeaseError, ResourceExhaustedError, StaleStampError
from baton.transport.kv_sink import ReserveSpec
from baton.types import RequestId, ReserveNumber, SampledToken, TokenLogprob
from tests.support.manual_clock import ManualClock
from tests.support.wire.kv_loopback import FIRST, LAYOUT, NUM_TOKENS, WIDE, Loopback, loopback, stale

pytestmark = pytest.mark.integration


@pytest.fixture
async def loop() -> AsyncIterator[Loopback]:
    async with loopback() as both_ends:
        yield both_ends


async def test_lease_verbs_raise_the_receivers_errors(loop: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.transport.kv_receiver._wait_s", lambda context: 0.2)
    lease = await loop.reserve()
    with pytest.raises(ResourceExhaustedError):
        await loop.reserve()
    with pytest.raises(StaleStampError):
        await loop.client.renew(stale(lease).ref, 5)
    with pytest.raises(IncompletePushError):
        await loop.client.commit(lease.ref, [FIRST], timeout_s=60)


async def test_reserve_with_another_layout_is_refused(loop: Loopback) -> None:
    with pytest.raises(LayoutMismatchError):
        await dataclasses.replace(loop, layout=WIDE).reserve()


async def test_renewed_lease_lives_on() -> None:
    clock = ManualClock()
    async with loopback(clock=clock) as loop:
        lease = await loop.reserve(ttl_s=5)
        clock.advance(4)
        await loop.client.renew(lease.ref, 5)
        clock.advance(4)
        await loop.client.renew(lease.ref, 5)


async def test_commit_carries_the_first_token_with_its_logprobs(loop: Loopback) -> None:
    lease = await loop.reserve()
    await loop.push_all(lease)
    first = SampledToken(5, -0.5, (TokenLogprob(5, -0.5), TokenLogprob(6, -1.5)))
    assert await loop.client.commit(lease.ref, [first]) == NUM_TOKENS * LAYOUT.token_bytes
    assert loop.sink.first(lease.ref) == first


async def test_commit_may_be_repeated(loop: Loopback) -> None:
    lease = await loop.reserve()
    await loop.push_all(lease)
    assert await loop.client.commit(lease.ref, [FIRST]) == await loop.client.commit(lease.ref, [FIRST])


async def test_abort_may_be_repeated(loop: Loopback) -> None:
    lease = await loop.reserve()
    await loop.client.abort(lease.ref)
    await loop.client.abort(lease.ref)
    assert (await loop.reserve()).ref.stamp > lease.ref.stamp


async def test_a_reserve_is_aborted_by_its_number(loop: Loopback) -> None:
    spec = ReserveSpec(RequestId("r"), 1, NUM_TOKENS, NUM_TOKENS, ttl_s=60.0, number=ReserveNumber(7))
    lease = await loop.client.reserve(spec, LAYOUT.fingerprint)
    await loop.client.abort_reserve(ReserveNumber(7))
    assert (await loop.reserve()).ref.stamp > lease.ref.stamp
    with pytest.raises(LeaseError, match="7 was aborted"):
        await loop.client.reserve(spec, LAYOUT.fingerprint)

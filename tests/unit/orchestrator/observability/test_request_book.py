"""The requests that an orchestrator tells of, from arrival to end: who is told which id, and nothing of prompts."""

from dataclasses import fields, replace

import pytest

from baton import AsyncClient, TokenOrigin
from baton.errors import RequestCancelledError
from baton.process.clock import SystemClock
from baton.results.request_list import RequestStatus
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, RequestId
from orchestrator.observability.request_book import RequestBook
from orchestrator.observability.traces import NUM_KEPT
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import HASTY, cluster
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
CLOCK = SystemClock()


def record(number: int, tenant: str = "default") -> RequestRecord:
    request = Request(RequestId(f"r{number}"), (1, 2, 3), PARAMS, tenant=Tenant(tenant))
    return RequestRecord.of(request, CLOCK.unix_ns())


def end(book: RequestBook, made: RequestRecord) -> None:
    error = RequestCancelledError("gone")
    book.ended(made, made.finish(CLOCK.unix_ns(), FinishReason.CANCELLED, error))


def test_only_the_latest_that_ended_are_kept_and_no_record_of_them() -> None:
    book = RequestBook(CLOCK)
    for number in range(NUM_KEPT + 10):
        made = record(number)
        book.opened(made)
        end(book, made)
    found = book.list(10_000, None).requests
    assert [each.number for each in found] == list(range(NUM_KEPT + 10, 10, -1))
    assert not book._open
    assert [each.number for each in book.list(2, None).requests] == [NUM_KEPT + 10, NUM_KEPT + 9]
    assert book.list(0, None).requests == ()


def test_requests_that_run_are_all_told_in_order_of_arrival() -> None:
    book, made = RequestBook(CLOCK), [record(number) for number in range(3)]
    for each in made:
        book.opened(each)
    end(book, made[1])
    found = book.list(1, None).requests
    assert [(each.number, each.state, each.error) for each in found] == [
        (3, "queued", ""),
        (2, "finished", "RequestCancelledError"),
        (1, "queued", ""),
    ]
    assert found[1].timings.finished_ns and not found[0].timings.finished_ns


def test_ids_are_for_the_request_s_own_tenant_and_for_operators() -> None:
    book = RequestBook(CLOCK)
    for number, tenant in enumerate(("acme", "other")):
        book.opened(record(number, tenant))

    def told(tenant: str | None) -> list[tuple[str, str]]:
        return [(each.request_id, each.tenant) for each in book.list(0, tenant).requests]

    assert told(None) == [("r1", "other"), ("r0", "acme")]
    assert told("acme") == [("", ""), ("r0", "acme")]


def test_a_status_has_no_field_for_prompts_or_outputs() -> None:
    names = {each.name for each in fields(RequestStatus)}
    assert not names & {"prompt", "prompt_ids", "output", "output_ids", "text", "params", "request"}


async def test_a_chain_s_request_is_told_with_its_groups_and_ranks_while_it_runs() -> None:
    async with cluster() as made, AsyncClient(f"{HOST}:{made.server.port}") as client:
        made.group_gates[0].shut()
        call = made.open(made.request(prompt(40), PARAMS))
        await made.group_gates[0].until_reached()  # the first token came with the KV: the next one waits

        async def only() -> RequestStatus:
            (found,) = (await client.requests()).requests
            return found

        def streams(each: RequestStatus) -> bool:
            return each.state == "streaming" and len(each.timings.prefill.ranks) == 2

        running = await eventually(only, streams)
        assert (running.generation, running.prefill) == ("group-0", "chain")
        assert running.usage.num_prompt_tokens == 40 and running.usage.num_output_tokens == 1
        assert running.timings.finished_ns == 0 and running.reasons == ()
        assert sum(len(rank.tokens) for rank in running.timings.prefill.ranks) == 40
        assert all(not rank.layers for rank in running.timings.prefill.ranks)
        made.group_gates[0].open()
        async for _ in call:
            pass
        ended = await eventually(only, lambda each: each.state == "finished")
        assert ended.reasons == (FinishReason.LENGTH,) and ended.usage.num_output_tokens == 6
        assert ended.timings.finished_ns >= ended.timings.first_token_ns


@pytest.mark.ci
async def test_tokens_say_where_they_come_from_once_for_each_change() -> None:
    async with cluster() as made, AsyncClient(f"{HOST}:{made.server.port}") as client:

        async def attribution(num_tokens: int, n: int) -> dict[int, list[TokenOrigin | None]]:
            found: dict[int, list[TokenOrigin | None]] = {choice: [] for choice in range(n)}
            async for event in client.generate(token_ids=prompt(num_tokens), params=replace(PARAMS, n=n)):
                found[event.choice].append(event.origin)
            return found

        for told in (await attribution(40, 2)).values():
            assert [each and each.prefill for each in told] == ["chain", "", None, None, None, None]
            assert told[0] is not None and told[0].generation == "group-0"
        made.members.update(made.view(prefill_ready=False))
        (local,) = (await attribution(40, 1)).values()
        assert [each and (each.generation, each.prefill) for each in local] == [("group-0", ""), *[None] * 5]


async def test_an_attempt_elsewhere_is_another_origin_and_the_status_names_its_group() -> None:
    async with cluster(num_groups=2, config=HASTY) as made, AsyncClient(f"{HOST}:{made.server.port}") as client:
        for gate in made.group_gates:
            gate.shut(num_passes=4 * made.decoder.config.num_layers)
        stream = client.generate(token_ids=prompt(40), params=replace(PARAMS, max_tokens=60))
        events = [await anext(stream) for _ in range(3)]
        busy = await made.busy_group()
        await made.lose_group(busy)
        events += [event async for event in stream]
        told = [(event.index, event.origin.generation, event.origin.prefill) for event in events if event.origin]
        before, after = f"group-{busy}", f"group-{1 - busy}"
        assert told[:2] == [(0, before, "chain"), (1, before, "")]
        resumed = told[2][0]
        assert told[2:] == [(resumed, after, "chain"), (resumed + 1, after, "")]
        (status,) = (await client.requests()).requests
        assert (status.generation, status.num_failures, status.usage.num_attempts) == (after, 1, 2)
        made.groups.pop(busy)


async def test_keys_decide_who_is_told() -> None:
    tenants = Tenants(
        (Tenant("acme", key_hashes=(hash_key("a"),)),), require_key=True, operator_hashes=(hash_key("boss"),)
    )
    async with cluster(config=replace(HASTY, tenants=tenants)) as made:
        target = f"{HOST}:{made.server.port}"
        made.metadata = (("authorization", "Bearer boss"),)
        async with AsyncClient(target, api_key="a") as acme, AsyncClient(target, api_key="boss") as boss:
            await acme.generate(token_ids=prompt(9), params=PARAMS, request_id="hers").collect()
            await boss.generate(token_ids=prompt(9), params=PARAMS, request_id="his").collect()
            assert [each.request_id for each in (await boss.requests()).requests] == ["his", "hers"]
            assert [each.request_id for each in (await acme.requests()).requests] == ["", "hers"]

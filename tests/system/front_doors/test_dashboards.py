"""Every query of every dashboard, and every alert, in a real Prometheus that scrapes a live cluster and its gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import BatonError, ResourceExhaustedError
from baton.sampling_params import SamplingParams
from orchestrator.requests.config import AutoscalingConfig
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import HASTY, BareCluster, cluster
from tests.support.clusters.planners import deciding_planner
from tests.support.engines.generation import prompt
from tests.support.engines.prefixes import prefix_folder
from tests.support.eventually import eventually
from tests.support.manifests import DASHBOARDS, OBSERVABILITY, Query, documents, filled, queries
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.tools import find_command
from tests.support.wire.http_gateway import Http, http_gateway
from tests.support.wire.prometheus import Prometheus, prometheus

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=20, seed=4, ignore_eos=True, num_drafts=2)
CONFIG = replace(
    HASTY,
    block_tokens=16,
    max_queued_requests=1,
    autoscaling=AutoscalingConfig(mode="advise", interval_s=0.05),
)
NOT_DRIVEN = {"baton_prefix_fetches", "baton_scaling_changes"}
"""Events with labels that this cluster has not: it has one node, and no reason to change its groups."""


@asynccontextmanager
async def live() -> AsyncIterator[tuple[BareCluster, Http]]:
    """A cluster with all that has metrics: a chain, drafts, a prefix store, an autoscaler, and an HTTP gateway."""
    with prefix_folder() as folder:
        async with (
            cluster(
                config=CONFIG,
                planner=deciding_planner(),
                num_slots=2,
                folders={"prefill": folder, "generate": folder},
                prefix_bytes=2**20,
                generate={"speculation": "streaming"},
            ) as made,
            http_gateway(f"{HOST}:{made.server.port}", letter_tokenizer()) as http,
        ):
            yield made, http


async def drive(made: BareCluster, http: Http) -> None:
    """Requests that end well, one that the queue refuses, and one whose attempts fail."""
    for number in range(4):
        await made.ask(made.request((*prompt(40), *prompt(9, seed=number)), PARAMS))
    await http.openai.completions.create(model="letters", prompt="Once upon a time", max_tokens=4)
    made.group_gates[0].shut(num_passes=60)  # some tokens come, and not all
    calls = [made.open(made.request(prompt(20), replace(PARAMS, max_tokens=300))) for _ in range(3)]
    await eventually(made.state, lambda state: (state.num_running, state.num_queued) == (2, 1))
    with pytest.raises(ResourceExhaustedError):
        await made.ask(made.request(prompt(20), PARAMS))
    made.group_gates[0].open()
    for call in calls:
        call.cancel()
    await made.until_empty(10.0)
    await made.ranks[0].stop()
    with pytest.raises(BatonError):
        await made.ask(made.request(prompt(40), PARAMS))


@pytest.fixture
def program() -> str:
    found = find_command("prometheus")
    if found is None:
        pytest.skip("prometheus is not installed: tools/install_debian_tools.sh")
    return found


@pytest.mark.ci
async def test_every_query_resolves_against_a_live_scrape(program: str, tmp_path: Path) -> None:
    async with live() as (made, http):
        targets = [f"{HOST}:{made.server.metrics_port}", f"{HOST}:{http.port}"]
        async with prometheus(program, tmp_path, targets) as asked:
            await made.ask(made.request(prompt(20), PARAMS))  # so that a scrape has seen what then increases
            await asked.until_scraped(1, since=await asked.until_scraped(0))
            await drive(made, http)
            await asked.until_scraped(4, since=await asked.until_scraped(0))
            families, empty = await asked.families(), list[Query]()
            asking = [query for path in DASHBOARDS for query in queries(path)]
            assert len(asking) > 50
            for query in asking:
                assert query.families, f"{query.panel}: {query.expr} asks for no metric"
                assert query.families <= families, f"{query.panel}: {query.families - families} is no metric"
                if not await asked.query(query.expr):
                    empty.append(query)
            assert {family for query in empty for family in query.families} <= NOT_DRIVEN, empty
            await check_values(asked, made)
            rules = await eventually(asked.rules, lambda rules: all(each["health"] != "unknown" for each in rules), 20)
            (written,) = documents(OBSERVABILITY / "alerts.yaml")
            alerts = [rule["alert"] for group in written["groups"] for rule in group["rules"]]
            assert {each["name"]: each["health"] for each in rules} == dict.fromkeys(alerts, "ok")


async def check_values(asked: Prometheus, made: BareCluster) -> None:
    """What was driven is what is shown."""
    seen = await made.metrics()
    assert await asked.value("sum(baton_requests_total)") == sum(
        value for name, value in seen.items() if name.startswith("baton_requests_total")
    )
    assert await asked.value(filled("sum(increase(baton_requests_total[$__rate_interval]))", "1m")) > 0
    assert await asked.value("sum(baton_http_requests_total{status='200', route='/v1/completions'})") == 1
    assert await asked.value("sum(baton_requests_refused_total)") >= 1


@pytest.mark.ci
async def test_a_query_for_a_metric_that_is_not_there_is_seen(program: str, tmp_path: Path) -> None:
    async with live() as (made, _http), prometheus(program, tmp_path, [f"{HOST}:{made.server.metrics_port}"]) as asked:
        await asked.until_scraped(1)
        wrong = Query("wrong", "sum(rate(baton_request_total[1m]))")
        assert not wrong.families <= await asked.families() and not await asked.query(wrong.expr)
        with pytest.raises(AssertionError, match="parse error"):
            await asked.query("sum(rate(baton_requests_total[1m])")

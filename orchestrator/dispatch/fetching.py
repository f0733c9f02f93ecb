"""Fetches cached KV from another node's prefix store before an attempt begins, as planned by `orchestrator.placement`.

Called by `orchestrator.dispatch.attempt`. A worker of the target node copies the blocks. The names of stored and
evicted blocks are reported to the prefix index. The speed of the copy is reported to the planner. A failed or late
fetch is not an error: the attempt is planned again without a fetch. Runs on the event loop, in the request's task.
"""

import logging

from baton.errors import BatonError
from baton.planning.planner import ChainPlanner
from baton.process.clock import Clock
from baton.results.prefill_trace import PrefixFetch
from orchestrator.placement.block_fetches import BlockFetch, BlockSources
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.record import RequestRecord
from orchestrator.workers.client import Clients, FetchReport

logger = logging.getLogger(__name__)


class BlockFetcher:
    """Fetches cached KV blocks from the prefix stores of other nodes. Any number of fetches may run at the same time.
    Updates the prefix index. After a failure, pauses fetches between the same two stores."""

    def __init__(
        self, clients: Clients, prefixes: PrefixIndex, sources: BlockSources, planner: ChainPlanner, clock: Clock
    ) -> None:
        self._clients = clients
        self._prefixes = prefixes
        self._sources = sources
        self._planner = planner
        self._clock = clock

    async def run(self, fetch: BlockFetch, record: RequestRecord) -> PrefixFetch:
        """Fetch the blocks within a bounded time, and return the result. If the fetch fails, the result says so; no
        BatonError is raised."""
        start_s = self._clock.now_s()
        is_probe = self._sources.pauses.of(fetch.pair).began()
        try:
            with self._clients.use(fetch.target.endpoint) as worker:
                report = await worker.fetch_blocks(fetch)
        except BatonError as error:
            report = FetchReport(shortfall=str(error))
        took_s = self._clock.now_s() - start_s
        self._note(fetch, report, is_probe=is_probe)
        logger.info(
            "fetched request=%s attempt=%d from=%s to=%s tokens=%d bytes=%d seconds=%.3f predicted=%.3f: %s",
            *(record.request_id, record.attempt.number, fetch.source.group, fetch.target.group, fetch.num_tokens),
            *(report.num_bytes, took_s, fetch.predicted_s, report.shortfall or "complete"),
        )
        return PrefixFetch(
            fetch.source.group, fetch.num_tokens, report.num_bytes, fetch.predicted_s, took_s, report.shortfall
        )

    def _note(self, fetch: BlockFetch, report: FetchReport, *, is_probe: bool) -> None:
        source, target = fetch.pair
        self._prefixes.forget(target, report.evicted)
        self._prefixes.use(target, fetch.names[: report.num_stored])
        if report.missing_block:
            self._prefixes.forget(source, (report.missing_block,))
        else:
            self._prefixes.use(source, fetch.names[: report.num_stored])
        if report.num_bytes:
            self._planner.observe_fetch(report.num_bytes, report.copying_s, is_far=fetch.is_far)
        if not report.shortfall:
            self._sources.pauses.of(fetch.pair).succeeded(is_probe=is_probe)
        elif not report.missing_block:  # a wrong hint does not mean that the link is bad
            self._sources.failed(fetch)

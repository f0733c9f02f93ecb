"""A prefill rank whose two neighbours are simulated by the test over real links."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import KvBuffer, MakeBuffer, byte_view
from baton.process.clock import Clock, SystemClock
from baton.types import Epoch, JobId, Rank, RequestId, TokenRange
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job, JobReport
from prefill_workers.links import LinkHeader, Links, LinkStatus
from tests.support.engines.chains import WAIT_S, KeepingSender, cached_prefix, until
from tests.support.links.link_groups import Recorder, in_process_connects
from tests.support.manual_clock import ManualClock

IDS = (5, 6, 7, 8, 9, 10)
CHUNKS = (TokenRange(0, 2), TokenRange(2, 5), TokenRange(5, 6))


class Middle:
    """Group of three ranks. Rank 1 is an engine; ranks 0 and 2 are bare links and recorders of what they receive."""

    def __init__(self, engine: PrefillEngine, links: dict[int, Links], recorders: dict[int, Recorder]) -> None:
        self.engine = engine
        self.links = links
        self.recorders = recorders
        self.decoder = engine.decoder
        self.kv = cached_prefix(self.decoder, IDS, len(IDS))

    def job(self, number: int = 1, num_ranks: int = 3) -> Job:
        """Return a job on ranks 0 to 2 (`num_ranks` 3) or on ranks 0 and 1 (`num_ranks` 2)."""
        chunks = CHUNKS if num_ranks == 3 else (CHUNKS[0], TokenRange(2, 6))
        ranks = tuple(Rank(rank) for rank in range(num_ranks))
        return Job(JobId(number), Epoch(1), RequestId("r"), 1, ranks, chunks, IDS)

    def submit_and_starve(self, job: Job | None = None) -> Future[JobReport]:
        """Submit a job, by default on ranks 0 and 1. Return when the engine cannot continue without KV of rank 0."""
        future = self.engine.submit(job or self.job(num_ranks=2), KeepingSender())
        until(lambda: self.engine.status().progress == 1)
        return future

    def send_rows(self, layer: int, number: int = 1, tokens: TokenRange = CHUNKS[0], epoch: int = 1) -> None:
        """Send a layer's KV to the engine, as rank 0 does."""
        payload = byte_view(self.kv.span(layer, tokens).clone())
        header = LinkHeader(Epoch(epoch), JobId(number), layer, tokens, LinkStatus.DATA, payload.nbytes)
        self.links[0].send(Rank(1), header, payload)

    def send_all_rows(self, number: int = 1) -> None:
        for layer in range(self.decoder.config.num_layers):
            self.send_rows(layer, number)

    def send_bare(self, status: LinkStatus, number: int = 1) -> None:
        self.links[0].send(Rank(1), LinkHeader.bare(Epoch(1), JobId(number), status), None)

    def pass_limits(self, clock: ManualClock, floor_s: float, ranks: Sequence[int]) -> None:
        """Advance the clock by nearly three watchdog limits: by 0.3 limits whenever each of `ranks` has received
        another sign of life."""
        for count in range(1, 10):
            for rank in ranks:
                self.recorders[rank].wait_received(count)
            clock.advance(0.3 * floor_s)
            self.poke()

    def poke(self) -> None:
        """Wake a waiting engine, so that it reads the clock that the test has advanced."""
        with self.engine._changed:
            self.engine._changed.notify_all()


@contextmanager
def middle_rank(
    decoder: Decoder, *, clock: Clock | None = None, floor_s: float = 20.0, make_buffer: MakeBuffer = KvBuffer
) -> Iterator[Middle]:
    """Start an epoch of three ranks and run the engine of the middle one. At the end, check that its threads and all
    links have ended."""
    config = PrefillConfig(watchdog_floor_s=floor_s)
    engine = PrefillEngine(decoder, clock or SystemClock(), config, make_buffer=make_buffer)
    recorders = {0: Recorder(), 2: Recorder()}
    connects = in_process_connects(3)
    with ThreadPoolExecutor(2) as pool:
        bare = {rank: pool.submit(connects[rank], recorder) for rank, recorder in recorders.items()}
        engine.start_epoch(Epoch(1), Rank(1), 3, connects[1])
        links = {rank: future.result(WAIT_S) for rank, future in bare.items()}
    try:
        yield Middle(engine, links, recorders)
    finally:
        for recorder in recorders.values():
            recorder.gate.set()
        engine.close()
        for each in links.values():
            each.close()
            assert each.wait_closed(WAIT_S)

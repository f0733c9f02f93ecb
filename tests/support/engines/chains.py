"""Prefill groups inside one process: engines connected by real links, senders that record what is pushed, and reference
results computed by a single decoder."""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from baton.errors import JobAbortedError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.sampling import SamplerState, sample
from baton.modeling.kv.buffers import TORCH_DTYPES, BufferSpan, KvBuffer, MakeBuffer
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, KvLayout, Rank, RequestId, SampledToken, TokenRange
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job, JobReport
from prefill_workers.links import ConnectLinks, LinkHandler, LinkHeader, Links, LinkStatus, Payload
from tests.support.links.link_groups import MakeConnect, in_process_connects

WAIT_S = 30.0
_MOST_LOOK_S = 0.1
"""Maximum time in seconds that one check counts towards a limit, as in `tests.support.eventually`."""


class KeepingSender:
    """KvSender that keeps views of the pushed data and reads them only at the end, as a real push may.

    `on_push` is called with the layer at every push, and may raise.
    """

    num_present = 0

    def __init__(self, on_push: Callable[[int], None] | None = None) -> None:
        self.pieces: list[tuple[int, TokenRange, memoryview]] = []
        self.at_push: list[bytes] = []
        self.from_earlier: dict[int, tuple[TokenRange, bytes]] = {}
        """Token range and data received from earlier ranks, by layer."""
        self.finishes: list[tuple[SampledToken, ...]] = []
        self.aborts: list[BaseException] = []
        self.layer_pushed = threading.Condition()
        self._on_push = on_push

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        assert not self.finishes and not self.aborts, "a push after the end"
        if self._on_push is not None:
            self._on_push(layer)
        with self.layer_pushed:
            self.pieces.append((layer, tokens, data))
            self.at_push.append(bytes(data))
            self.layer_pushed.notify_all()

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        assert layer not in self.from_earlier, "received twice"
        self.from_earlier[layer] = tokens, bytes(data)

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        assert not self.finishes and not self.aborts, "a second end"
        self.finishes.append(firsts)

    def abort(self, error: BaseException) -> None:
        assert not self.aborts, "a second abort"
        self.aborts.append(error)

    def wait_pushed(self, num_pieces: int) -> None:
        with self.layer_pushed:
            assert self.layer_pushed.wait_for(lambda: len(self.pieces) >= num_pieces, WAIT_S)


class Hold:
    """`on_push` callback that stops an engine within a turn until the test opens the gate."""

    def __init__(self) -> None:
        self._began, self.gate = threading.Event(), threading.Event()

    def __call__(self, *_: int) -> None:
        self._began.set()
        assert self.gate.wait(WAIT_S)

    def wait_begun(self) -> None:
        """Wait until an engine is stopped."""
        assert self._began.wait(WAIT_S)


class CountingLinks:
    """Wrapper of links that records the header of every message sent."""

    def __init__(self, links: Links, sent: list[LinkHeader]) -> None:
        self._links = links
        self._sent = sent

    @property
    def on_device(self) -> bool:
        return self._links.on_device

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        assert header.num_bytes == (0 if payload is None else payload.nbytes)
        self._sent.append(header)
        self._links.send(target, header, payload)

    def close(self) -> None:
        self._links.close()

    def wait_closed(self, timeout_s: float) -> bool:
        return self._links.wait_closed(timeout_s)


@dataclass
class Run:
    """One job, with its senders and results on all of its ranks."""

    jobs: dict[Rank, Job]
    senders: dict[Rank, KeepingSender]
    futures: dict[Rank, Future[JobReport]] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        return next(iter(self.jobs.values()))

    def reports(self) -> list[JobReport]:
        return [self.futures[rank].result(WAIT_S) for rank in self.job.ranks]

    def error(self, rank: int) -> BaseException:
        error = self.futures[Rank(rank)].exception(WAIT_S)
        assert error is not None, f"rank {rank} succeeded"
        return error

    def first_token(self) -> SampledToken:
        self.reports()
        finishes = [self.senders[rank].finishes for rank in self.job.ranks]
        assert all(finish == [()] for finish in finishes[:-1])
        (((first, *_),),) = finishes[-1:]
        assert isinstance(first, SampledToken)
        return first

    def kv(self, layout: KvLayout) -> Tensor:
        """Return the KV `[L, S, 2, G, H]` that all ranks pushed. Fails if the KV of a token was not pushed exactly
        once, or changed after its push."""
        self.reports()
        total = self.job.chunks[-1].end
        kv = torch.full((layout.num_layers, total, 2, layout.num_kv_heads, layout.head_dim), torch.nan)
        seen = torch.zeros(layout.num_layers, total, dtype=torch.int)
        for kv_sender in self.senders.values():
            for (layer, tokens, data), then in zip(kv_sender.pieces, kv_sender.at_push, strict=True):
                assert bytes(data) == then, "pushed rows changed"
                rows = torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[layout.dtype])
                kv[layer, tokens.start : tokens.end] = rows.view(len(tokens), 2, layout.num_kv_heads, -1).float()
                seen[layer, tokens.start : tokens.end] += 1
        assert bool((seen == 1).all()), "a row was pushed twice, or never"
        return kv


class ChainGroup:
    """Group of `num_ranks` linked prefill engines with the same decoder. As a context manager, it closes all of
    them."""

    def __init__(
        self,
        decoder: Decoder,
        num_ranks: int,
        *,
        connects: MakeConnect = in_process_connects,
        watchdog_floor_s: float = 20.0,
        make_buffer: MakeBuffer | None = None,
        device_memory_bytes: int = 0,
    ) -> None:
        self.decoder = decoder
        self.numbers = itertools.count(1)
        self.epoch = Epoch(0)
        self.sent: list[list[LinkHeader]] = [[] for _ in range(num_ranks)]
        config = PrefillConfig(watchdog_floor_s=watchdog_floor_s, device_memory_bytes=device_memory_bytes)
        self.engines = [
            PrefillEngine(decoder, SystemClock(), config, make_buffer=make_buffer) for _ in range(num_ranks)
        ]
        self._connects = connects

    def __enter__(self) -> Self:
        self.start_epoch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ThreadPoolExecutor(len(self.engines)) as pool:
            list(pool.map(lambda engine: engine.close(), self.engines))

    def start_epoch(self) -> None:
        self.epoch = Epoch(self.epoch + 1)
        num_ranks = len(self.engines)
        connects = self._connects(num_ranks)

        def start(rank: int) -> None:
            connect = self._counting(rank, connects[rank])
            self.engines[rank].start_epoch(self.epoch, Rank(rank), num_ranks, connect)

        with ThreadPoolExecutor(num_ranks) as pool:
            list(pool.map(start, range(num_ranks)))

    def prepare(
        self,
        prompt_ids: Sequence[int],
        chunks: Sequence[TokenRange],
        *,
        ranks: Sequence[int] | None = None,
        output_ids: Sequence[int] = (),
        params: SamplingParams | None = None,
        prefix: Callable[[], KvBuffer | tuple[KvBuffer, ...]] | None = None,
        on_push: Callable[[Rank, int], None] | None = None,
        due_s: float = 0.0,
    ) -> Run:
        """Create a job without submitting it. `prefix` is called once per rank."""
        number = JobId(next(self.numbers))
        placed = tuple(Rank(rank) for rank in ranks or range(len(chunks)))
        jobs = {
            rank: Job(
                number,
                self.epoch,
                RequestId(f"request-{number}"),
                1,
                placed,
                tuple(chunks),
                tuple(prompt_ids),
                tuple(output_ids),
                params or SamplingParams(),
                _pieces(prefix() if prefix is not None else ()),
                due_s,
            )
            for rank in placed
        }
        return Run(jobs, {rank: KeepingSender(_bind(on_push, rank)) for rank in placed})

    def submit(self, run: Run, order: Iterable[int] | None = None) -> Run:
        """Submit the job to its ranks, in `order`."""
        for rank in map(Rank, order if order is not None else run.job.ranks):
            run.futures[rank] = self.engines[rank].submit(run.jobs[rank], run.senders[rank])
        return run

    def payload_bytes(self) -> int:
        """Return the number of KV bytes that all ranks have sent over links."""
        return sum(header.num_bytes for sent in self.sent for header in sent if header.status is LinkStatus.DATA)

    def wait_idle(self) -> None:
        """Wait until no engine holds a job."""
        until(lambda: all(engine.status().num_jobs == 0 for engine in self.engines))

    def _counting(self, rank: int, connect: ConnectLinks) -> ConnectLinks:
        def join(handler: LinkHandler) -> Links:
            return CountingLinks(connect(handler), self.sent[rank])

        return join


def until(holds: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Poll until `holds()` returns True. Fails after `within_s` seconds of polling."""
    pause, spent_s, looked_s = threading.Event(), 0.0, time.monotonic()
    while not holds():
        assert spent_s < within_s, f"still not so after {within_s:g} s"
        pause.wait(0.002)
        now_s = time.monotonic()
        spent_s, looked_s = spent_s + min(now_s - looked_s, _MOST_LOOK_S), now_s


def _pieces(prefix: KvBuffer | tuple[KvBuffer, ...]) -> tuple[KvBuffer, ...]:
    return prefix if isinstance(prefix, tuple) else (prefix,)


def _bind(on_push: Callable[[Rank, int], None] | None, rank: Rank) -> Callable[[int], None] | None:
    return None if on_push is None else lambda layer: on_push(rank, layer)


def random_tokens(rng: random.Random, count: int, decoder: Decoder) -> list[int]:
    return [rng.randrange(decoder.config.vocab_size) for _ in range(count)]


def random_chunks(rng: random.Random, tokens: TokenRange, num_ranks: int) -> list[TokenRange]:
    """Return random chunks of uneven lengths. The last chunk often has a single token."""
    cuts = sorted(rng.sample(range(tokens.start + 1, tokens.end), num_ranks - 1))
    if num_ranks > 1 and rng.random() < 0.5:
        cuts[-1] = tokens.end - 1
    edges = [tokens.start, *cuts, tokens.end]
    if sorted(set(edges)) != edges:
        return random_chunks(rng, tokens, num_ranks)
    return [TokenRange(a, b) for a, b in pairwise(edges)]


def reference(decoder: Decoder, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the KV `[L, S, 2, G, H]` of the whole prompt and the last token's logits `[V]`, computed in one forward
    pass, both in fp32."""
    with torch.inference_mode():
        tokens = TokenRange(0, len(token_ids))
        buffer = decoder.device.buffer(decoder.layout, tokens)
        hidden_TD = decoder.forward(token_ids, [BufferSpan(buffer, tokens)])
        return buffer.data.float(), decoder.logits(hidden_TD[-1:])[0]


def reference_token(decoder: Decoder, job: Job) -> SampledToken:
    """Return the next token of a job's request, computed without a prefill group."""
    return next_token(decoder, job.prompt_ids, job.output_ids, job.params)


def next_token(
    decoder: Decoder, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> SampledToken:
    """Return the token that follows prompt and output, computed without a prefill group."""
    _, logits_V = reference(decoder, [*prompt_ids, *output_ids])
    state = SamplerState(params, prompt_ids, output_ids, decoder.config.eos_token_ids)
    with torch.inference_mode():
        return sample(logits_V.unsqueeze(0), [state])[0]


def generated(
    decoder: Decoder, prompt_ids: Sequence[int], params: SamplingParams, num_tokens: int
) -> list[SampledToken]:
    """Return the first `num_tokens` tokens of an answer, computed without a prefill group."""
    output: list[SampledToken] = []
    while len(output) < num_tokens:
        output.append(next_token(decoder, prompt_ids, [token.token_id for token in output], params))
    return output


def cached_prefix(decoder: Decoder, token_ids: Sequence[int], num_tokens: int) -> KvBuffer:
    """Return the KV of the first `num_tokens` tokens, as a prefix store would return it."""
    tokens = TokenRange(0, num_tokens)
    there, home = decoder.device.buffer(decoder.layout, tokens), KvBuffer(decoder.layout, tokens)
    with torch.inference_mode():
        decoder.forward(token_ids[:num_tokens], [BufferSpan(there, tokens)])
    for layer in range(decoder.layout.num_layers):
        home.write(layer, tokens, there.export(layer, tokens))
    return home


def poisoned_buffer(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
    """A KvBuffer in which every element is NaN until it is written."""
    buffer = KvBuffer(layout, tokens)
    buffer.data.fill_(torch.nan)
    return buffer


def largest_error(kv: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of any layer: max |kv - expected| / max |expected|. NaN if there is a NaN."""
    difference_L = (kv - expected).abs().flatten(1).amax(1)
    return float((difference_L / expected.abs().flatten(1).amax(1)).max())


def random_run(group: ChainGroup, rng: random.Random, num_tokens: int = 24) -> Run:
    """Create a job with a random prompt, random chunks, random ranks and a random due time."""
    ids = random_tokens(rng, num_tokens, group.decoder)
    ranks = sorted(rng.sample(range(len(group.engines)), rng.randint(1, len(group.engines))))
    chunks = random_chunks(rng, TokenRange(0, num_tokens), len(ranks))
    return group.prepare(ids, chunks, ranks=ranks, due_s=rng.randrange(4))


def submit_shuffled(group: ChainGroup, runs: list[Run], rng: random.Random, victims: Sequence[Run] = ()) -> None:
    """Submit the jobs to their ranks in a random order, which differs from rank to rank. Jobs of `victims` may be
    aborted before a rank receives them."""
    submissions = [(run, rank) for run in runs for rank in run.job.ranks]
    rng.shuffle(submissions)
    for run, rank in submissions:
        with contextlib.suppress(*[JobAbortedError] if run in victims else []):
            group.submit(run, order=[rank])


def run_chain(
    group: ChainGroup,
    seed: int,
    *,
    prefix_tokens: int = 0,
    num_tokens: int = 60,
    on_push: Callable[[Rank, int], None] | None = None,
) -> Run:
    """Submit a job with a random prompt in random chunks, one chunk per rank."""
    rng = random.Random(seed)
    ids = random_tokens(rng, num_tokens, group.decoder)
    chunks = random_chunks(rng, TokenRange(prefix_tokens, num_tokens), len(group.engines))
    prefix = (lambda: cached_prefix(group.decoder, ids, prefix_tokens)) if prefix_tokens else None
    return group.submit(group.prepare(ids, chunks, prefix=prefix, on_push=on_push))


def assert_right(group: ChainGroup, run: Run, decoder: Decoder | None = None, most_error: float = 1e-5) -> None:
    """Assert that a run's KV and first token equal those computed by `decoder` in one forward pass. Default: the
    group's decoder."""
    decoder = decoder or group.decoder
    kv, _ = reference(decoder, run.job.token_ids)
    assert largest_error(run.kv(decoder.layout), kv) <= most_error
    assert run.first_token() == reference_token(decoder, run.job)

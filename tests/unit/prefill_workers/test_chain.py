"""A chain computes what one process computes: KV of every layer, and the first token."""

import random
import threading
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import KvBuffer, LayerBuffers
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, KvLayout, Rank, RequestId, TokenRange
from prefill_workers import kv_pipeline as pipeline_module
from prefill_workers.chain import ChainJob
from prefill_workers.job import Job
from prefill_workers.kv_pipeline import KvPipeline, RankKv
from tests.support.engines.chains import (
    WAIT_S,
    ChainGroup,
    Hold,
    KeepingSender,
    assert_right,
    generated,
    largest_error,
    poisoned_buffer,
    random_chunks,
    random_tokens,
    reference,
    reference_token,
    run_chain,
    until,
)
from tests.support.links.link_groups import MakeConnect, in_process_connects, torch_connects
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

HEADS = {"mha": 4, "gqa": 2, "mqa": 1}


def decoder_of(heads: str = "gqa", *, dtype: str = "float32", num_layers: int = 3) -> Decoder:
    return random_decoder(num_layers=num_layers, num_kv_heads=HEADS[heads], dtype=dtype, seed=len(heads))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_kv_and_first_token_equal_one_process(heads: str, num_ranks: int) -> None:
    decoder = decoder_of(heads)
    with ChainGroup(decoder, num_ranks) as group:
        for seed in range(6):
            assert_right(group, run_chain(group, seed))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_with_a_cached_prefix(heads: str, num_ranks: int) -> None:
    decoder = decoder_of(heads)
    with ChainGroup(decoder, num_ranks) as group:
        for prefix_tokens in (1, 16, 50):
            assert_right(group, run_chain(group, prefix_tokens, prefix_tokens=prefix_tokens))


@pytest.mark.parametrize("prefix_tokens", [0, 16])
def test_the_last_rank_gives_away_what_earlier_ranks_computed(prefix_tokens: int) -> None:
    decoder = decoder_of()
    with ChainGroup(decoder, 3) as group:
        run = run_chain(group, 5, prefix_tokens=prefix_tokens)
        expected, earlier = run.kv(decoder.layout), TokenRange(prefix_tokens, run.job.chunks[-1].start)
        received = run.senders[Rank(2)].from_earlier
        assert sorted(received) == [0, 1, 2]
        for layer, (tokens, data) in received.items():
            assert tokens == earlier
            assert data == expected[layer, earlier.start : earlier.end].contiguous().numpy().tobytes()
        assert not run.senders[Rank(0)].from_earlier and not run.senders[Rank(1)].from_earlier


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (1, 1, 1), (1, 2, 1), (1, 17, 1)])
def test_chunks_of_one_token(lengths: tuple[int, ...]) -> None:
    decoder = decoder_of()
    ids = random_tokens(random.Random(len(lengths)), sum(lengths), decoder)
    chunks = [TokenRange(*edges) for edges in pairwise(accumulate(lengths, initial=0))]
    with ChainGroup(decoder, len(lengths)) as group:
        assert_right(group, group.submit(group.prepare(ids, chunks)))


@pytest.mark.parametrize(
    "decoder", [decoder_of(num_layers=1), random_decoder(num_layers=3, window=8)], ids=["one layer", "short window"]
)
def test_models_of_one_layer_and_of_windows_shorter_than_a_chunk(decoder: Decoder) -> None:
    with ChainGroup(decoder, 3) as group:
        for seed in range(4):
            assert_right(group, run_chain(group, seed))


@pytest.mark.parametrize("ranks", [(0, 2), (1,), (1, 2), (0, 1, 2)])
def test_chain_over_some_of_the_ranks(ranks: tuple[int, ...]) -> None:
    decoder = decoder_of()
    rng = random.Random(sum(ranks))
    ids = random_tokens(rng, 30, decoder)
    with ChainGroup(decoder, 3) as group:
        chunks = random_chunks(rng, TokenRange(0, 30), len(ranks))
        run = group.submit(group.prepare(ids, chunks, ranks=ranks))
        assert_right(group, run)
        assert [report.rank for report in run.reports()] == list(ranks)


def test_resumed_prompt_is_prompt_and_output() -> None:
    decoder = decoder_of()
    prompt_ids = random_tokens(random.Random(1), 33, decoder)
    params = SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.2)
    *output, following = generated(decoder, prompt_ids, params, num_tokens=8)
    output_ids = [token.token_id for token in output]
    kv, _ = reference(decoder, prompt_ids + output_ids)
    with ChainGroup(decoder, 2) as group:
        chunks = [TokenRange(0, 25), TokenRange(25, 40)]
        run = group.submit(group.prepare(prompt_ids, chunks, output_ids=output_ids, params=params))
        assert largest_error(run.kv(decoder.layout), kv) <= 1e-5
        assert run.first_token() == following


def test_first_token_is_sampled_as_asked() -> None:
    decoder = decoder_of()
    ids = random_tokens(random.Random(2), 20, decoder)
    params = SamplingParams(temperature=1.5, seed=3, logprobs=2)
    with ChainGroup(decoder, 2) as group:
        run = group.submit(group.prepare(ids, [TokenRange(0, 9), TokenRange(9, 20)], params=params))
        first, expected = run.first_token(), reference_token(decoder, run.job)
    assert first.token_id == expected.token_id
    assert first.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert [top.token_id for top in first.top] == [top.token_id for top in expected.top]


def test_every_choice_gets_a_first_token_of_its_own() -> None:
    decoder = decoder_of()
    ids = random_tokens(random.Random(2), 20, decoder)
    params = SamplingParams(temperature=3.0, seed=5, n=4)
    with ChainGroup(decoder, 2) as group:
        run = group.submit(group.prepare(ids, [TokenRange(0, 9), TokenRange(9, 20)], params=params))
        run.first_token()
        firsts = run.senders[run.job.ranks[-1]].finishes[0]
    expected = [reference_token(decoder, replace(run.job, params=params.of_choice(choice))) for choice in range(4)]
    assert [token.token_id for token in firsts] == [token.token_id for token in expected]
    assert len({token.token_id for token in firsts}) > 1


@pytest.mark.parametrize("prefix_tokens", [0, 16])
def test_unwritten_memory_never_surfaces(prefix_tokens: int) -> None:
    decoder = decoder_of()
    with ChainGroup(decoder, 3, make_buffer=poisoned_buffer) as group:
        for seed in range(5):
            assert_right(group, run_chain(group, seed, prefix_tokens=prefix_tokens))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bfloat16_is_as_close_to_float32_as_one_process_is(num_ranks: int) -> None:
    decoder, exact = decoder_of(dtype="bfloat16"), decoder_of()
    chain_error, single_error = torch.zeros(()), torch.zeros(())
    with ChainGroup(decoder, num_ranks) as group:
        for seed in range(8):
            run = run_chain(group, seed)
            expected, _ = reference(exact, run.job.token_ids)
            single, _ = reference(decoder, run.job.token_ids)
            chain_error += (run.kv(decoder.layout) - expected).square().mean()
            single_error += (single - expected).square().mean()
    assert 0 < chain_error.sqrt() <= 1.1 * single_error.sqrt()


@pytest.mark.parametrize("changed_rank", [0, 1, 2])
def test_token_changes_nothing_before_it(changed_rank: int) -> None:
    decoder = decoder_of()
    ids = random_tokens(random.Random(5), 30, decoder)
    chunks = [TokenRange(0, 12), TokenRange(12, 13), TokenRange(13, 30)]
    position = chunks[changed_rank].start
    changed = [*ids[:position], (ids[position] + 1) % decoder.config.vocab_size, *ids[position + 1 :]]
    with ChainGroup(decoder, 3) as group:
        before = group.submit(group.prepare(ids, chunks))
        after = group.submit(group.prepare(changed, chunks))
        assert_right(group, after)
        before.reports()
    for rank in range(3):
        same = before.senders[Rank(rank)].at_push == after.senders[Rank(rank)].at_push
        assert same == (rank < changed_rank)


@pytest.mark.parametrize(("prefix_tokens", "num_ranks"), [(0, 1), (0, 2), (0, 4), (16, 3)])
def test_bytes_on_links_are_each_rank_s_end_times_layers(prefix_tokens: int, num_ranks: int) -> None:
    decoder = decoder_of()
    with ChainGroup(decoder, num_ranks) as group:
        run = run_chain(group, 3, prefix_tokens=prefix_tokens)
        passed = [(chunk.end - prefix_tokens) * decoder.layout.token_bytes for chunk in run.job.chunks[:-1]]
        assert [report.num_bytes_sent for report in run.reports()] == [*passed, 0]
        assert group.payload_bytes() == sum(passed)


def test_each_rank_s_chunk_is_a_message_of_its_own_in_every_layer() -> None:
    decoder = decoder_of()
    with ChainGroup(decoder, 3) as group:
        run = run_chain(group, 3)
        run.reports()
        chunks = run.job.chunks
        for rank, sent in enumerate(group.sent):
            messages = [(header.layer, header.tokens) for header in sent]
            assert [layer for layer, _ in messages] == sorted(layer for layer, _ in messages)
            earlier_and_own = chunks[: rank + 1] if rank < 2 else ()
            expected = [(layer, chunk) for layer in range(decoder.config.num_layers) for chunk in earlier_and_own]
            assert sorted(messages) == expected


@pytest.mark.parametrize("connects", [in_process_connects, torch_connects])
@pytest.mark.parametrize("piece_tokens", [1, 7])
def test_chunks_in_many_pieces(monkeypatch: pytest.MonkeyPatch, connects: MakeConnect, piece_tokens: int) -> None:
    monkeypatch.setattr(pipeline_module, "PIECE_TOKENS", piece_tokens)
    decoder = decoder_of()
    with ChainGroup(decoder, 4, connects=connects, make_buffer=poisoned_buffer) as group:
        for prefix_tokens in (0, 16):
            sent = group.payload_bytes()
            run = run_chain(group, prefix_tokens, prefix_tokens=prefix_tokens)
            assert_right(group, run)
            passed = sum(chunk.end - prefix_tokens for chunk in run.job.chunks[:-1])
            assert group.payload_bytes() - sent == passed * decoder.layout.token_bytes


def test_first_rank_goes_on_to_later_requests_while_an_earlier_one_is_stuck_behind_it() -> None:
    decoder = decoder_of()
    num_layers = decoder.config.num_layers
    hold, rng = Hold(), random.Random(9)

    with ChainGroup(decoder, 2) as group:
        runs = [
            group.prepare(random_tokens(rng, 20, decoder), random_chunks(rng, TokenRange(0, 20), 2)) for _ in range(3)
        ]
        for run in runs:
            run.senders[Rank(1)] = KeepingSender(hold)
            group.submit(run)
        for run in runs:
            run.futures[Rank(0)].result(WAIT_S)  # computed, pushed and passed on
            assert len(run.senders[Rank(0)].pieces) == num_layers
        assert not any(run.futures[Rank(1)].done() for run in runs)
        hold.gate.set()
        for run in runs:
            assert_right(group, run)


def test_rank_in_step_with_the_one_before_it_holds_few_layers() -> None:
    decoder = decoder_of(num_layers=8)
    made: list[TokenRange] = []
    last_began = [threading.Event() for _ in range(8)]

    def make(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        made.append(tokens)
        return poisoned_buffer(layout, tokens)

    def in_step(rank: Rank, layer: int) -> None:
        if rank == 1:
            last_began[layer].set()
        elif layer > 0:
            assert last_began[layer - 1].wait(WAIT_S)

    ids = random_tokens(random.Random(4), 40, decoder)
    with ChainGroup(decoder, 2, make_buffer=make) as group:
        chunks = [TokenRange(0, 25), TokenRange(25, 40)]
        run = group.submit(group.prepare(ids, chunks, on_push=in_step))
        assert_right(group, run)
    layers = made.count(TokenRange(0, 25)) - 1  # rank 0's own chunk is one
    assert 1 <= layers <= 3


def test_early_ranks_kv_leaves_before_the_chain_ends() -> None:
    decoder = decoder_of()
    ids = random_tokens(random.Random(5), 20, decoder)
    with ChainGroup(decoder, 2) as group:
        run = group.prepare(ids, [TokenRange(0, 10), TokenRange(10, 20)])
        group.submit(run, order=[0])
        run.senders[Rank(0)].wait_pushed(decoder.config.num_layers)  # rank 1 does not even have the job
        group.submit(run, order=[1])
        assert_right(group, run)


def test_report_times_every_layer() -> None:
    decoder = decoder_of()
    with ChainGroup(decoder, 2) as group:
        for report in run_chain(group, 0).reports():
            starts = [layer.start_ns for layer in report.layers]
            assert len(report.layers) == decoder.config.num_layers
            assert starts == sorted(starts)
            assert all(layer.start_ns <= layer.end_ns for layer in report.layers)
            assert (report.start_ns, report.end_ns) == (starts[0], report.layers[-1].end_ns)


def test_wait_is_reported_by_the_rank_that_waited() -> None:
    decoder = decoder_of()
    ids = random_tokens(random.Random(5), 20, decoder)
    with ChainGroup(decoder, 2) as group:
        run = group.prepare(ids, [TokenRange(0, 10), TokenRange(10, 20)])
        group.submit(run, order=[1])
        until(lambda: group.engines[1].status().progress == 1)  # it has done what it can
        group.submit(run, order=[0])
        first, second = run.reports()
    assert first.wait_s == 0.0
    assert second.wait_s > 0.0


COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast "
    "broadcast_object_list gather gather_object monitored_barrier reduce reduce_scatter reduce_scatter_tensor scatter "
    "scatter_object_list"
).split()
GROUP_COLLECTIVES = (
    "allgather allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall "
    "alltoall_base barrier broadcast gather monitored_barrier reduce reduce_scatter reduce_scatter_tensor_coalesced "
    "scatter"
).split()


def test_no_collective_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective was called")

    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, refuse)
    for owner in (dist.ProcessGroup, dist.ProcessGroupGloo):
        present = [name for name in GROUP_COLLECTIVES if hasattr(owner, name)]
        assert len(present) >= 8, "torch has renamed its collectives"
        for name in present:
            monkeypatch.setattr(owner, name, refuse)
    decoder = decoder_of()
    with ChainGroup(decoder, 3, connects=torch_connects) as group:
        for seed in range(3):
            assert_right(group, run_chain(group, seed))
        assert group.payload_bytes() > 0


class TickingClock:
    """Every reading takes a second."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 1.0
        return self._now_s

    def unix_ns(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("chunks", "factor"), [(((0, 4), (4, 36)), 1.0), (((0, 32), (32, 64)), 1.0), (((0, 95), (95, 96)), 127 / 33)]
)
def test_patience_grows_with_the_largest_chunk_in_front(chunks: tuple[tuple[int, int], ...], factor: float) -> None:
    decoder, clock = decoder_of(), TickingClock()
    ranges = tuple(TokenRange(*chunk) for chunk in chunks)
    ids = [1] * ranges[-1].end
    job = Job(JobId(1), Epoch(1), RequestId("r"), 1, (Rank(0), Rank(1)), ranges, ids)
    own_kv, earlier_kv = KvBuffer(decoder.layout, ranges[1]), LayerBuffers(decoder.layout, ranges[0])
    lock = threading.Condition()
    kv = RankKv(job, Rank(1), own_kv, earlier_kv)
    pipeline = KvPipeline(kv, clock=clock, lock=lock, send=lambda *message: None)
    chain_job = ChainJob(KeepingSender(), pipeline, decoder=decoder, clock=clock)
    with torch.inference_mode():
        chain_job.turn()
    assert chain_job.slowest_turn_s == 3.0  # the clock is also read twice as the layer begins
    assert chain_job.expected_turn_s == pytest.approx(3.0 * factor)
    assert chain_job.starved

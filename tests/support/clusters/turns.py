"""Run the turns of a chat on a cluster, check their tokens, and record how many were cached, fetched and pushed."""

from dataclasses import dataclass

from baton.proto_types import timings_from_proto
from baton.results.prefill_trace import PlacementTerms
from baton.results.timings import Timings
from baton.sampling_params import SamplingParams
from baton.types import TokenEvent
from orchestrator.requests.record import Finished
from orchestrator.requests.request import Request
from tests.support.clusters.cluster import BareCluster
from tests.support.engines.generation import prompt, reference_ids


@dataclass(frozen=True)
class Turn:
    """One turn of a chat: a request and its answer."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_cached: int
    num_pushed: int
    """Number of tokens whose KV the prefill ranks pushed."""
    timings: Timings

    def then(self, num_new: int, seed: int) -> tuple[int, ...]:
        """Return the prompt of the next turn: this turn's prompt and answer, and `num_new` new tokens."""
        return (*self.prompt_ids, *self.token_ids, *prompt(num_new, seed=seed))

    @property
    def local(self) -> PlacementTerms:
        """Return the predicted terms of prefill by the generation group itself."""
        placement = self.timings.prefill.placement
        assert placement is not None and placement.local is not None
        return placement.local

    @property
    def num_fetched(self) -> int:
        """Return the number of KV bytes that were fetched from another node."""
        return self.timings.prefill.fetch.num_bytes if self.timings.prefill.fetch is not None else 0

    @property
    def shortfall(self) -> str:
        """Return the reason why a fetch returned fewer tokens than planned; empty if it returned all."""
        assert self.timings.prefill.fetch is not None, "nothing was to be fetched"
        return self.timings.prefill.fetch.shortfall


async def ask_turn(made: BareCluster, prompt_ids: tuple[int, ...], params: SamplingParams) -> Turn:
    """Run a request. Check that its tokens are correct and that one attempt sufficed."""
    got = await made.ask(made.request(prompt_ids, params))
    assert got.token_ids == reference_ids(made.decoder, prompt_ids, params)
    usage, timings = got.end.usage, timings_from_proto(got.end.timings)
    assert usage.num_attempts == 1
    num_bytes = sum(rank.num_bytes_pushed for rank in timings.prefill.ranks)
    num_pushed, rest = divmod(num_bytes, made.decoder.layout.token_bytes)
    assert not rest
    return Turn(prompt_ids, tuple(got.token_ids), usage.num_cached_tokens, num_pushed, timings)


async def generate(made: BareCluster, request: Request) -> Finished:
    """Run a request without gRPC, check its tokens, and return its last event."""
    events = [event async for event in made.server.orchestrator.scheduler.generate(request)]
    ids = [event.token.token_id for event in events if isinstance(event, TokenEvent) and event.token]
    assert ids == reference_ids(made.decoder, request.prompt_ids, request.params)
    assert isinstance(events[-1], Finished)
    return events[-1]

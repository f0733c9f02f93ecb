"""A request as its client asked for it, checked against the model's limits: it never changes.

Made by `orchestrator.api.request_reader`, or in process by `deploy.commands.session`; what becomes of it is in
`orchestrator.requests.record`. Pure.
"""

from dataclasses import dataclass, replace

from baton.sampling_params import SamplingParams
from baton.types import FinishReason, Priority, RequestId
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class Request:
    """One request for generation. Its fields are checked before it is made."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """Sampling parameters of the whole request, seed included."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """Tokens that the client has from an earlier stream, by choice, after which this one continues; empty if new."""
    ended: tuple[FinishReason | None, ...] = ()
    """For each of `outputs`, the reason why that choice has ended; None where it continues."""
    deadline_s: float | None = None
    """Time at which the request ends by itself, on the scheduler's Clock.now_s(); None for no deadline."""
    echo: str = ""
    """Text with which the text of each choice begins."""
    has_output: bool = True
    """False: the client wants the prompt's logprobs alone, and does not get the one token that a group makes."""
    priority: Priority = Priority.STANDARD
    tenant: Tenant = DEFAULT_TENANT
    """The tenant that sent the request."""
    by_chain: bool = False
    """True if a chain prefills, if there is one, even where the generation group is predicted to be faster."""
    exact: bool = False
    """True if only groups that attend to all tokens may serve it: the client required that, or got it as a promise."""
    trace_context: tuple[tuple[str, str], ...] = ()
    """The caller's W3C trace context, as its `traceparent` and `tracestate`; empty without one."""
    prefix_salt: str = ""
    """Salt in the names of the prompt's blocks: only requests of the same salt share cached prefixes. As the client
    gave it, until the scheduler has added the tenant's."""

    @property
    def is_resumed(self) -> bool:
        """Return whether the client resumes an earlier orchestrator's stream, which a group may still run."""
        return bool(self.outputs)

    @property
    def num_given(self) -> int:
        """Return the number of output tokens, over all choices, that the client had when the request came."""
        return sum(len(ids) for ids in self.outputs)

    @property
    def num_slots(self) -> int:
        """Return the number of slots that the request needs: one per choice."""
        return self.params.n

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens whose KV the request's first attempt has to make."""
        return len(self.prompt_ids) + (len(self.outputs[0]) if len(self.outputs) == 1 else 0)

    @property
    def capacity_tokens(self) -> int:
        """Return the number of tokens that each of the request's slots must hold at its end."""
        return len(self.prompt_ids) + self.params.max_tokens

    def with_a_token(self) -> "Request":
        """Return the request as a group can serve it: one without output makes a token, which is left out."""
        if self.params.max_tokens:
            return self
        return replace(self, params=replace(self.params, max_tokens=1), has_output=False)

    def of_choice(self, index: int, params: SamplingParams) -> "Request":
        """Return the request for one of several choices alone, with that choice's own parameters."""
        outputs = self.outputs[index : index + 1]
        return replace(self, request_id=RequestId(f"{self.request_id}/{index}"), params=params, outputs=outputs)

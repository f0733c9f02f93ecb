"""Request of a client, checked against the model's limits. A request never changes.

Made by `orchestrator.api.request_reader`, or in process by `deploy.commands.session`. The progress of a request is
recorded in `orchestrator.requests.record`. Pure.
"""

from dataclasses import dataclass, replace

from baton.sampling_params import SamplingParams
from baton.types import FinishReason, Priority, RequestId
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class Request:
    """One request for generation. Its fields are validated before it is made."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """Sampling parameters of the whole request, seed included."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """Output tokens that the client has already received from an earlier stream, by choice. Each choice continues after
    them. Empty for a new request."""
    ended: tuple[FinishReason | None, ...] = ()
    """For each item of `outputs`, the finish reason of that choice; None if the choice has not ended and continues."""
    deadline_s: float | None = None
    """Time at which the request is ended, on the clock of the scheduler's Clock.now_s(); None for no deadline."""
    echo: str = ""
    """Text that is prepended to the output text of each choice."""
    has_output: bool = True
    """False if the client wants only the prompt's logprobs. A group then still generates one token, which is not sent
    to the client."""
    priority: Priority = Priority.STANDARD
    tenant: Tenant = DEFAULT_TENANT
    """The tenant that sent the request."""
    by_chain: bool = False
    """True if a prefill chain must be used when one exists, even if prefill on the generation group is predicted to be
    faster."""
    exact: bool = False
    """True if only groups that attend to all tokens may serve the request, because the client required it or because it
    was promised in the Started event."""
    trace_context: tuple[tuple[str, str], ...] = ()
    """The caller's W3C trace context, as its `traceparent` and `tracestate`; empty if the caller sent none."""
    prefix_salt: str = ""
    """Salt of the hashes of the prompt's blocks. Only requests with the same salt share cached prefixes. It is the
    client's salt until the scheduler adds the tenant's name."""

    @property
    def is_resumed(self) -> bool:
        """Return True if the client resumes a stream of an earlier orchestrator, which a group may still be running."""
        return bool(self.outputs)

    @property
    def num_given(self) -> int:
        """Return the number of output tokens, summed over all choices, that the client had already received before it
        sent the request."""
        return sum(len(ids) for ids in self.outputs)

    @property
    def num_slots(self) -> int:
        """Return the number of slots that the request needs: one per choice."""
        return self.params.n

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens whose KV must be computed by the first attempt."""
        return len(self.prompt_ids) + (len(self.outputs[0]) if len(self.outputs) == 1 else 0)

    @property
    def capacity_tokens(self) -> int:
        """Return the maximum number of tokens that each of the request's slots must be able to hold: prompt plus
        output."""
        return len(self.prompt_ids) + self.params.max_tokens

    def with_a_token(self) -> "Request":
        """Return the request in a form that a group can serve: if max_tokens is 0, with max_tokens 1 and `has_output`
        False."""
        if self.params.max_tokens:
            return self
        return replace(self, params=replace(self.params, max_tokens=1), has_output=False)

    def of_choice(self, index: int, params: SamplingParams) -> "Request":
        """Return a request for one of several choices only, with that choice's own sampling parameters."""
        outputs = self.outputs[index : index + 1]
        return replace(self, request_id=RequestId(f"{self.request_id}/{index}"), params=params, outputs=outputs)

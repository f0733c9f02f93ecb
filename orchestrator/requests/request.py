"""Client's request after validation against the model's limits. A request never changes.

Created by `orchestrator.api.request_reader`, or in process by `deploy.commands.session`. The progress of a request is
recorded in `orchestrator.requests.record`. Does no I/O.
"""

from dataclasses import dataclass, replace

from baton.sampling_params import SamplingParams
from baton.types import FinishReason, Priority, RequestId
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class Request:
    """Request for generation. Its fields have been validated before it is created."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """Sampling parameters of the whole request, including its seed."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """Output tokens of each choice that the client has already received from an earlier stream. The choices continue
    after these tokens. Empty for a new request."""
    ended: tuple[FinishReason | None, ...] = ()
    """Finish reasons of the choices in `outputs`, in the same order. None for a choice that has not ended and
    continues."""
    deadline_s: float | None = None
    """Time at which the request is ended if it still runs, as a value of the scheduler's `Clock.now_s()`; None: no
    deadline."""
    echo: str = ""
    """Text to send before the output text of each choice; empty for none."""
    has_output: bool = True
    """False if the client wants only the log-probabilities of the prompt's tokens. One token is then still generated,
    but not sent to the client."""
    priority: Priority = Priority.STANDARD
    tenant: Tenant = DEFAULT_TENANT
    """Tenant that sent the request."""
    by_chain: bool = False
    """True if a prefill chain must be used whenever one is available, even if a prefill on the generation group is
    predicted to be faster."""
    exact: bool = False
    """True if only groups that attend to all tokens may serve the request. Set if the client requires it. A client
    that resumes a stream requires it if an earlier Started event reported it. Also set by the scheduler if all groups
    attend to all tokens when the request arrives."""
    trace_context: tuple[tuple[str, str], ...] = ()
    """Caller's W3C trace context, as pairs of header name (`traceparent`, `tracestate`) and value. Empty if the caller
    sent none."""
    prefix_salt: str = ""
    """Salt for hashing the prompt's blocks. Only requests with the same salt share cached prefixes. At first it is the
    client's salt; the scheduler then adds the tenant's name."""

    @property
    def is_resumed(self) -> bool:
        """Return True if the client resumes an earlier stream. A generation group may still be running this stream."""
        return bool(self.outputs)

    @property
    def num_given(self) -> int:
        """Return the total number of output tokens, over all choices, that the client had received before it sent this
        request."""
        return sum(len(ids) for ids in self.outputs)

    @property
    def num_slots(self) -> int:
        """Return the number of slots that the request needs: one per choice."""
        return self.params.n

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens whose KV the first attempt must compute or load."""
        return len(self.prompt_ids) + (len(self.outputs[0]) if len(self.outputs) == 1 else 0)

    @property
    def capacity_tokens(self) -> int:
        """Return the number of tokens that each slot of the request must be able to hold: the prompt plus the maximum
        output."""
        return len(self.prompt_ids) + self.params.max_tokens

    def with_a_token(self) -> "Request":
        """Return the request in a form that generation groups can serve. If max_tokens is 0, the result has max_tokens
        1 and `has_output` False. Otherwise the request is returned unchanged."""
        if self.params.max_tokens:
            return self
        return replace(self, params=replace(self.params, max_tokens=1), has_output=False)

    def of_choice(self, index: int, params: SamplingParams) -> "Request":
        """Return a request for only the choice number `index` of this request. `params` are the sampling parameters of
        this choice."""
        outputs = self.outputs[index : index + 1]
        return replace(self, request_id=RequestId(f"{self.request_id}/{index}"), params=params, outputs=outputs)

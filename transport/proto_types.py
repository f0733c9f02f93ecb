"""Values that workers exchange, to and from their messages. Pure; those of users' clients are in baton.proto_types.

`x_from_proto` trusts nothing: what a hostile or newer peer may send raises InvalidArgumentError or
VersionMismatchError, never an assert.
"""

from collections.abc import Sequence
from typing import NamedTuple

from baton.errors import InvalidArgumentError
from baton.ids import RequestId, SlotId, Stamp
from baton.proto_types import event_from_proto as event_from_proto
from baton.proto_types import event_to_proto as event_to_proto
from baton.proto_types import finish_from_proto as finish_from_proto
from baton.proto_types import finish_to_proto as finish_to_proto
from baton.proto_types import params_from_proto as params_from_proto
from baton.proto_types import params_to_proto as params_to_proto
from baton.proto_types import range_from_proto as range_from_proto
from baton.proto_types import range_to_proto as range_to_proto
from baton.proto_types import sampled_from_proto as sampled_from_proto
from baton.proto_types import sampled_to_proto as sampled_to_proto
from baton.sampling_params import SamplingParams
from baton.types import KernelChoice, Lease, LeaseRef
from baton.v1 import common_pb2


class History(NamedTuple):
    """What a sampler is rebuilt from."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Tokens that the request's stream already has; empty at the first attempt."""
    params: SamplingParams


def lease_ref_to_proto(ref: LeaseRef) -> common_pb2.LeaseRef:
    """The slot and stamp as a message."""
    return common_pb2.LeaseRef(slot=ref.slot, stamp=ref.stamp)


def lease_ref_from_proto(message: common_pb2.LeaseRef) -> LeaseRef:
    """The slot and stamp that a message names; whether they exist is the sink's to say."""
    return LeaseRef(SlotId(message.slot), Stamp(message.stamp))


def lease_to_proto(lease: Lease) -> common_pb2.Lease:
    """The lease as a message."""
    return common_pb2.Lease(
        ref=lease_ref_to_proto(lease.ref),
        request_id=lease.request_id,
        attempt=lease.attempt,
        num_tokens=lease.num_tokens,
        endpoint=lease.endpoint,
        ttl_s=lease.ttl_s,
        num_present_tokens=lease.num_present_tokens,
    )


def lease_from_proto(message: common_pb2.Lease) -> Lease:
    """Raises InvalidArgumentError when the lease names no slot."""
    if not message.HasField("ref"):
        raise InvalidArgumentError("lease.ref is missing: pass on the lease as Reserve returned it")
    return Lease(
        ref=lease_ref_from_proto(message.ref),
        request_id=RequestId(message.request_id),
        attempt=message.attempt,
        num_tokens=message.num_tokens,
        endpoint=message.endpoint,
        ttl_s=message.ttl_s,
        num_present_tokens=message.num_present_tokens,
    )


def history_to_proto(
    prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> common_pb2.History:
    """What `history_from_proto` rebuilds the sampler's history from."""
    return common_pb2.History(prompt_ids=prompt_ids, output_ids=output_ids, sampling=params_to_proto(params))


def history_from_proto(message: common_pb2.History) -> History:
    """Raises InvalidArgumentError when a sampling parameter is out of its limits."""
    return History(tuple(message.prompt_ids), tuple(message.output_ids), params_from_proto(message.sampling))


def kernels_to_proto(choice: KernelChoice) -> common_pb2.KernelChoice:
    """Return the choice among kernels as a message."""
    return common_pb2.KernelChoice(
        processor=choice.processor, attention=choice.attention, panels=choice.panels, torch_rows=choice.torch_rows
    )


def kernels_from_proto(message: common_pb2.KernelChoice) -> KernelChoice:
    """Return the choice among kernels that a worker reports."""
    torch_rows = message.torch_rows if message.HasField("torch_rows") else None
    return KernelChoice(message.processor, message.attention, message.panels, torch_rows)

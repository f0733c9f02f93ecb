"""Conversions between the values that workers exchange and their protobuf messages. `baton.proto_types` converts the
values that clients exchange.

The `x_from_proto` functions do not trust their message. The content of a message from a hostile or newer peer may raise
InvalidArgumentError or VersionMismatchError, but never fails an assertion. Does no I/O. Callable from any thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from baton.errors import InvalidArgumentError
from baton.proto_types import params_from_proto, params_to_proto, read
from baton.sampling_params import SamplingParams
from baton.types import KernelChoice, Lease, LeaseRef, SlotId, Stamp
from baton.v1 import common_pb2


class History(NamedTuple):
    """Tokens of a request so far, and the request's sampling parameters. A worker rebuilds the sampler's state from
    them."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Output tokens that were already sent to the client; empty in the request's first attempt."""
    params: SamplingParams


def lease_ref_to_proto(ref: LeaseRef) -> common_pb2.LeaseRef:
    """Convert a LeaseRef (slot and stamp) to its protobuf message."""
    return common_pb2.LeaseRef(slot=ref.slot, stamp=ref.stamp)


def lease_ref_from_proto(message: common_pb2.LeaseRef) -> LeaseRef:
    """Convert a protobuf message to a LeaseRef (slot and stamp). Does not check that the slot and the lease exist; the
    sink checks this."""
    return LeaseRef(SlotId(message.slot), Stamp(message.stamp))


def lease_to_proto(lease: Lease) -> common_pb2.Lease:
    """Convert a Lease to its protobuf message."""
    return common_pb2.Lease(**vars(lease) | {"ref": lease_ref_to_proto(lease.ref)})


def lease_from_proto(message: common_pb2.Lease) -> Lease:
    """Convert a protobuf message to a Lease. Raises InvalidArgumentError if the message does not name a slot."""
    if not message.HasField("ref"):
        raise InvalidArgumentError("lease.ref is missing: pass on the lease as Reserve returned it")
    return read(Lease, message, ref=lease_ref_from_proto(message.ref))


def history_to_proto(
    prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> common_pb2.History:
    """Return a protobuf message that holds a request's prompt tokens, output tokens and sampling parameters.
    `history_from_proto` is the inverse."""
    return common_pb2.History(prompt_ids=prompt_ids, output_ids=output_ids, sampling=params_to_proto(params))


def history_from_proto(message: common_pb2.History) -> History:
    """Convert a protobuf message to a History. Raises InvalidArgumentError if a sampling parameter is out of range."""
    return History(tuple(message.prompt_ids), tuple(message.output_ids), params_from_proto(message.sampling))


def kernels_to_proto(choice: KernelChoice) -> common_pb2.KernelChoice:
    """Convert a KernelChoice to its protobuf message."""
    return common_pb2.KernelChoice(**vars(choice))


def kernels_from_proto(message: common_pb2.KernelChoice) -> KernelChoice:
    """Convert a worker's protobuf message to a KernelChoice."""
    return read(KernelChoice, message, torch_rows=message.torch_rows if message.HasField("torch_rows") else None)

"""Converts the values that workers exchange to and from their protobuf messages; `baton.proto_types` converts clients'.

No `x_from_proto` trusts its message: content of a hostile or newer peer may raise InvalidArgumentError or
VersionMismatchError, but never fails an assert. Pure; any thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from baton.errors import InvalidArgumentError
from baton.proto_types import params_from_proto, params_to_proto, read
from baton.sampling_params import SamplingParams
from baton.types import KernelChoice, Lease, LeaseRef, SlotId, Stamp
from baton.v1 import common_pb2


class History(NamedTuple):
    """Tokens of a request so far and its sampling parameters, from which a worker rebuilds the sampler's state."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Output tokens that the request's stream already has; empty at the first attempt."""
    params: SamplingParams


def lease_ref_to_proto(ref: LeaseRef) -> common_pb2.LeaseRef:
    """Return a slot and its stamp as a message."""
    return common_pb2.LeaseRef(slot=ref.slot, stamp=ref.stamp)


def lease_ref_from_proto(message: common_pb2.LeaseRef) -> LeaseRef:
    """Return the slot and stamp that a message names. Does not check that they exist: the sink does."""
    return LeaseRef(SlotId(message.slot), Stamp(message.stamp))


def lease_to_proto(lease: Lease) -> common_pb2.Lease:
    """Return a lease as a message."""
    return common_pb2.Lease(**vars(lease) | {"ref": lease_ref_to_proto(lease.ref)})


def lease_from_proto(message: common_pb2.Lease) -> Lease:
    """Return the lease that a message describes. Raises InvalidArgumentError when the lease names no slot."""
    if not message.HasField("ref"):
        raise InvalidArgumentError("lease.ref is missing: pass on the lease as Reserve returned it")
    return read(Lease, message, ref=lease_ref_from_proto(message.ref))


def history_to_proto(
    prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> common_pb2.History:
    """Return a request's tokens and sampling parameters as a message, the input of `history_from_proto`."""
    return common_pb2.History(prompt_ids=prompt_ids, output_ids=output_ids, sampling=params_to_proto(params))


def history_from_proto(message: common_pb2.History) -> History:
    """Return the message's history. Raises InvalidArgumentError for a sampling parameter out of its limits."""
    return History(tuple(message.prompt_ids), tuple(message.output_ids), params_from_proto(message.sampling))


def kernels_to_proto(choice: KernelChoice) -> common_pb2.KernelChoice:
    """Return a choice of kernels as a message."""
    return common_pb2.KernelChoice(**vars(choice))


def kernels_from_proto(message: common_pb2.KernelChoice) -> KernelChoice:
    """Return the choice of kernels that a worker's message describes."""
    return read(KernelChoice, message, torch_rows=message.torch_rows if message.HasField("torch_rows") else None)

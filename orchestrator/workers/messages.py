"""Builds the messages that are sent to workers for a request: a prefill job, a new stream, and the takeover of a
stream. Converts the costs of steps that workers report.

Used by `orchestrator.workers.client`. Jobs are created by `orchestrator.dispatch.attempt`. Does no I/O.
"""

from dataclasses import dataclass
from functools import cached_property

from baton.planning.step_cost import LearntCosts
from baton.planning.work_cost import WorkCost
from baton.prefix_blocks import PromptBlocks
from baton.proto_types import range_to_proto, read
from baton.transport.proto_types import history_to_proto, lease_ref_to_proto, lease_to_proto
from baton.types import JobId, Lease, StreamNumber
from baton.v1 import common_pb2, generate_pb2, prefill_pb2
from orchestrator.membership.view import PrefillGroup
from orchestrator.placement.chain_width import ChainPlan
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.workers.streams import check_size


@dataclass(frozen=True)
class PrefillJob:
    """Prefill job of one attempt at a request. All ranks of the prefill group get the same job."""

    record: RequestRecord
    number: JobId
    group: PrefillGroup
    chain: ChainPlan
    blocks: PromptBlocks
    """KV blocks of the prompt. The chain starts after the leading blocks that are cached, and stores the other blocks
    in the prefix store."""
    lease: Lease
    """Lease on the slots that receive the KV."""

    @cached_property
    def message(self) -> prefill_pb2.PrefillJob:
        """Return the message that is sent to every rank. The message is built once. Raises InvalidArgumentError if it
        is too large."""
        record, chain = self.record, self.chain
        job = prefill_pb2.PrefillJob(
            epoch=self.group.epoch,
            job=self.number,
            request_id=record.request_id,
            attempt=record.attempt.number,
            ranks=chain.ranks,
            chunks=[range_to_proto(chunk) for chunk in chain.chunks],
            history=history_to_proto(record.request.prompt_ids, record.output_ids, record.request.params),
            lease=lease_to_proto(self.lease),
            due_s=chain.job.due_s,
            layer_s=chain.layer_s,
            prefix_blocks=self.blocks.cached(chain.num_cached_tokens),
            keep_blocks=self.blocks.kept(chain.num_cached_tokens),
            block_tokens=self.blocks.block_tokens,
        )
        check_size(record.request_id, job.ByteSize())
        return job


def stream_request(
    record: RequestRecord, number: StreamNumber, config: OrchestratorConfig, lease: Lease | None
) -> generate_pb2.StreamRequest:
    """Return the message that opens an attempt's stream on a generation group. `lease` is the lease on the slots that
    receive the KV; None: the group prefills by itself."""
    return generate_pb2.StreamRequest(
        request_id=record.request_id,
        history=history_to_proto(record.request.prompt_ids, record.output_ids, record.request.params),
        lease=None if lease is None else lease_ref_to_proto(lease.ref),
        keep_s=config.lease_ttl_s,
        number=number,
        store=generate_pb2.BlockNaming(block_tokens=config.block_tokens, salt=record.request.prefix_salt),
    )


def takeover_request(record: RequestRecord, number: StreamNumber) -> generate_pb2.StreamRequest:
    """Return the message that takes over a stream. The generation group may have kept the stream since an earlier
    orchestrator ended."""
    outputs = [common_pb2.Output(token_ids=choice.output_ids) for choice in record.choices]
    return generate_pb2.StreamRequest(
        request_id=record.request_id,
        history=history_to_proto(record.request.prompt_ids, (), record.request.params),
        number=number,
        takeover=generate_pb2.Takeover(outputs=outputs),
    )


def step_costs_from_proto(message: generate_pb2.StepCosts) -> LearntCosts:
    """Convert the costs of steps in a generation group's status."""
    plain, verifying = read(WorkCost, message.plain), read(WorkCost, message.verifying)
    return read(LearntCosts, message, plain=plain, verifying=verifying)

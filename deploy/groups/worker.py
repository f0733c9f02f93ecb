"""Started worker, with the gRPC channel and the stubs for calls to it. Used on the supervisor's asyncio loop."""

import grpc

from baton.transport.channel import make_channel
from baton.transport.identity import ClusterSecret
from baton.v1 import generate_pb2, prefill_pb2
from baton.v1.generate_pb2_grpc import GenerationGroupStub
from baton.v1.kv_pb2_grpc import KvReceiverStub
from baton.v1.prefill_pb2_grpc import PrefillRankStub
from deploy.groups.failure_detector import FailureDetector
from deploy.groups.spawner import WorkerHandle

WorkerStatus = prefill_pb2.PrefillStatus | generate_pb2.GenerationStatus


class Worker:
    """One started worker, and the gRPC connection to it. If the worker is replaced, a new object is created."""

    def __init__(self, handle: WorkerHandle) -> None:
        self.handle = handle
        self.failure_detector = FailureDetector()
        secret = ClusterSecret(handle.config.place.secret)
        self._channel: grpc.aio.Channel = make_channel(handle.endpoint, secret=secret)
        self.prefill = PrefillRankStub(self._channel)
        self.generation = GenerationGroupStub(self._channel)
        self.kv = KvReceiverStub(self._channel)

    @property
    def name(self) -> str:
        return self.handle.config.name

    async def status(self, timeout_s: float) -> WorkerStatus:
        """Send one heartbeat and return the worker's status. Raises grpc.aio.AioRpcError if the worker does not answer
        within `timeout_s` seconds."""
        if self.handle.config.role == "prefill":
            return await self.prefill.GetStatus(prefill_pb2.PrefillStatusRequest(), timeout=timeout_s)
        return await self.generation.GetStatus(generate_pb2.GenerationStatusRequest(), timeout=timeout_s)

    async def disconnect(self) -> None:
        """Close the channel without ending the worker's process."""
        await self._channel.close()

    async def close(self) -> None:
        """Close the channel, and end the worker's process."""
        await self.disconnect()
        await self.handle.close()

"""Finds the address of a cluster's orchestrator from any machine that can reach the cluster's Ray. The supervisor keeps
the address in Ray's key-value store (`deploy.ray_cluster.memory`), and updates it when the orchestrator moves to
another node.

Queries Ray's control store by gRPC, without joining that Ray. The caller's machine does not need to be one of its
nodes, and the caller keeps running while the store is unreachable. Runs on the caller's asyncio loop.
"""

from collections.abc import Callable
from typing import Any

import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from baton.errors import UnavailableError
from deploy.ray_cluster.memory import KEY, memory_of

_ANSWER_S = 5.0


class OrchestratorFinder:
    """Reads the address of one cluster's orchestrator from the Ray at one address. `deploy.commands.ray_access` must
    have prepared the environment before."""

    def __init__(self, address: str, name: str) -> None:
        """Make a finder for the cluster of that name on the Ray at host:port."""
        self._where = f"cluster {name} on Ray at {address}"
        self._name = name
        self._channel: Any = init_grpc_channel(address, (("grpc.enable_http_proxy", 0),), asynchronous=True)
        make_stub: Callable[[Any], Any] = gcs_service_pb2_grpc.InternalKVGcsServiceStub  # untyped in ray
        self._store = make_stub(self._channel)

    async def find(self) -> str:
        """Return host:port of the orchestrator that serves or, if none serves now, of the last one. Raises
        UnavailableError if no orchestrator has served yet, or Ray does not answer."""
        messages: Any = gcs_service_pb2  # untyped in ray
        question = messages.InternalKVGetRequest(key=KEY.encode(), namespace=self._name.encode())
        try:
            answer = await self._store.InternalKVGet(question, timeout=_ANSWER_S)
        except grpc.RpcError as error:
            raise UnavailableError(
                f"{self._where} cannot be asked for ({error.code().name}): check --address"
            ) from error
        address = memory_of(answer.value).address if answer.value else None
        if address is None:
            raise UnavailableError(f"{self._where} does not serve: start it with `baton serve`, or check --cluster")
        return address.endpoint

    async def close(self) -> None:
        """Close the connection to Ray. Idempotent."""
        await self._channel.close()

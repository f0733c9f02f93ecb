"""Finds the address of a cluster's orchestrator. It works on any machine that can reach the cluster's Ray. The
supervisor stores the address in Ray's key-value store (`deploy.ray_cluster.memory`), and updates it when the
orchestrator moves to another node.

The module queries Ray's control store by gRPC and does not join that Ray, so the caller's machine does not need to be a
node of it. The caller's process also continues to run while the control store is unreachable. Functions run on the
caller's asyncio loop.
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
    """Client that reads the address of one cluster's orchestrator from Ray. `deploy.commands.ray_access` must have
    prepared the process's environment before this module is imported."""

    def __init__(self, address: str, name: str) -> None:
        """Make a finder for the cluster `name`. `address` is the address of Ray's control store, host:port."""
        self._where = f"cluster {name} on Ray at {address}"
        self._name = name
        self._channel: Any = init_grpc_channel(address, (("grpc.enable_http_proxy", 0),), asynchronous=True)
        make_stub: Callable[[Any], Any] = gcs_service_pb2_grpc.InternalKVGcsServiceStub  # untyped in ray
        self._store = make_stub(self._channel)

    async def find(self) -> str:
        """Return the address, host:port, of the orchestrator that serves now. If none serves now, return the address of
        the last one. Raises UnavailableError if no orchestrator has served yet, or if Ray does not answer."""
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

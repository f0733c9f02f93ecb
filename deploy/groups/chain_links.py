"""The epochs of one chain's links: in each, all ranks meet at a store in the supervisor.

Torch's store serves any caller. So it listens on the workers' interface only, and only while ranks meet.
"""

import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.errors import UnavailableError
from baton.settings.addresses import join_address
from baton.types import MAX_EPOCH, Epoch
from baton.v1 import prefill_pb2
from deploy.groups.worker import Worker

if TYPE_CHECKING:
    from torch.distributed import TCPStore


class ChainLinks:
    """Gives the ranks of one group new links. Owned by the group; used on its loop."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.epoch = Epoch(0)
        """Number of the present epoch; 0 before the first."""
        self._host = host
        self._timeout_s = timeout_s

    def skip_to(self, epoch: int) -> None:
        """Let the next epoch come after `epoch`, which a rank has reached under an earlier supervisor or by a foreign
        StartEpoch call. Raises UnavailableError when no epoch comes after it: that rank can only be replaced."""
        if epoch >= MAX_EPOCH:
            raise UnavailableError(f"a rank is in epoch {epoch}, and {MAX_EPOCH} is the last: its process must end")
        self.epoch = Epoch(max(self.epoch, epoch))

    async def renew(self, ranks: Sequence[Worker]) -> None:
        """Start the next epoch; return when all ranks have met. Raises the first grpc.aio.AioRpcError of a rank that
        has not joined."""
        store = await asyncio.to_thread(_make_store, self._host)
        port = store.port
        self.epoch = Epoch(self.epoch + 1)
        joins = (self._join(rank, len(ranks), worker, port) for rank, worker in enumerate(ranks))
        try:
            outcomes = await asyncio.gather(*joins, return_exceptions=True)
        finally:
            del store  # stops listening, even if a traceback keeps this frame
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _join(self, rank: int, num_ranks: int, worker: Worker, port: int) -> None:
        request = prefill_pb2.StartEpochRequest(
            epoch=self.epoch,
            rank=rank,
            num_ranks=num_ranks,
            store=join_address(self._host, port),
            timeout_s=self._timeout_s,
        )
        await worker.prefill.StartEpoch(request, timeout=2 * self._timeout_s)


def _make_store(host: str) -> "TCPStore":
    """Make a store where ranks meet, which listens on this host's interface until the last reference to it goes.

    torch, which alone would listen on all interfaces, is imported here, in a thread, because only the store needs it in
    this process.
    """
    from torch.distributed import TCPStore

    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(address, family=family)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())

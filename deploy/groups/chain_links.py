"""Creates the links between the ranks of a prefill chain.

A set of links is an epoch. An epoch starts when all ranks connect to a store (TCPStore of torch) in the supervisor.
When a link breaks, the epoch ends, and all links are created again in the next epoch.

Torch's store accepts any caller. Therefore it listens only on the workers' interface, and only while the ranks connect.
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
    """Creates new links between the ranks of one prefill chain. Owned by the chain's group, and used on its asyncio
    loop."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.epoch = Epoch(0)
        """Number of the current epoch (set of links). 0 before the first epoch."""
        self._host = host
        self._timeout_s = timeout_s

    def skip_to(self, epoch: int) -> None:
        """Ensure that the number of the next epoch (set of links) is greater than `epoch`. Called if a rank reports
        that it has already joined `epoch`. This happens if an earlier supervisor or another caller has sent the rank a
        StartEpoch call. Raises UnavailableError if `epoch` is the largest possible number; the rank must then be
        replaced."""
        if epoch >= MAX_EPOCH:
            raise UnavailableError(f"a rank is in epoch {epoch}, and {MAX_EPOCH} is the last: its process must end")
        self.epoch = Epoch(max(self.epoch, epoch))

    async def renew(self, ranks: Sequence[Worker]) -> None:
        """Start the next epoch (set of links), and return when all ranks have joined it. If a rank cannot join, raises
        the first grpc.aio.AioRpcError."""
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
    """Make a store to which ranks connect. It listens on this host's interface until the last reference to it is
    deleted.

    By default torch would listen on all interfaces. torch is imported in this function, in a thread, because only the
    store needs it in this process.
    """
    from torch.distributed import TCPStore

    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(address, family=family)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())

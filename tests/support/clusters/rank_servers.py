"""Servers of prefill ranks with an engine of the test's own."""

from baton.modeling.prefix_store.node import NodeStore
from baton.transport.channel import bind, make_server
from baton.transport.identity import ClusterSecret
from baton.v1 import prefill_pb2_grpc
from prefill_workers.engine import PrefillEngine
from prefill_workers.servicer import PrefillRankServicer, PrefillServer


async def serve_rank(
    engine: PrefillEngine, host: str, secret: ClusterSecret, store: NodeStore | None = None, *, may_share: bool = True
) -> PrefillServer:
    """Start the server of a rank. `store`: its prefix store. `may_share`: whether it may push through shared memory."""
    server = make_server(check=secret.check)
    port = bind(server, host)
    blocks = store.blocks if store is not None else None
    servicer = PrefillRankServicer(engine, host, secret, blocks, may_share=may_share)
    prefill_pb2_grpc.add_PrefillRankServicer_to_server(servicer, server)
    await server.start()
    return PrefillServer(server, servicer, port, store)

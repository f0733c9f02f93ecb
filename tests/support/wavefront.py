"""Reference implementation of the recursion of `baton.planning.chain.wavefront` in plain loops: slow, but easy to
verify."""

from collections.abc import Sequence

import numpy as np

from baton.planning.chain.wavefront import work_of
from baton.planning.cost_model import CostModel, Protocol, Receive


def reference(chunks: Sequence[int], cost: CostModel, protocol: Protocol, *, cached: int = 0) -> float:
    """Return the time in seconds of one partition of a prompt, as `chain_ttft` does. The code follows the formulas at
    the top of that file line by line."""
    num_ranks, last_layer = len(chunks), cost.num_layers - 1
    work = work_of(np.atleast_2d(np.asarray(chunks, dtype=np.float64)), cost, protocol, cached)
    h, link_free, push_free = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    for layer in range(cost.num_layers):
        inbox: list[float] = []  # when each message of this layer arrived at this rank
        ready = 0.0
        for rank in range(num_ranks):
            project, own, far, copy = (float(e[0, rank]) for e in (work.project, work.own, work.far, work.copy))
            if layer == last_layer and rank == num_ranks - 1:
                own, far = float(work.last_own[0, rank]), float(work.last_far[0, rank])
            whole = max(project + own + far + copy, cost.issue_s)
            begin = h[rank]
            if protocol.receive is Receive.BLOCKING:
                if rank:
                    begin = max(begin, ready) + cost.link.seconds(sum(chunks[:rank]) * cost.kv_bytes)
                received, h[rank] = begin, begin + whole
            else:
                received = inbox[-1] if rank else 0.0
                after = far + copy + (own if protocol.receive is Receive.OVERLAPPED else 0.0)
                h[rank] = max(begin + whole, received + after) if rank else begin + whole
            projected = begin + project
            ready = projected if protocol.cut_through else max(projected, received) + copy
            sizes = chunks[: rank + 1] if protocol.cut_through else [sum(chunks[: rank + 1])]
            leaves = [*inbox, ready] if protocol.cut_through else [ready]
            inbox = []
            for size, start in zip(sizes, leaves, strict=True):
                link_free[rank] = max(start, link_free[rank]) + size * cost.kv_bytes / cost.link.bandwidth
                inbox.append(link_free[rank] + cost.link.latency_s)
            if cost.push is not None:
                rows = chunks[rank] + (cached if rank == 0 else 0)
                push_free[rank] = max(projected, push_free[rank]) + rows * cost.kv_bytes / cost.push.bandwidth
    end = h[-1] + cost.head_s
    return end if cost.push is None else max(end, *push_free) + cost.push.latency_s

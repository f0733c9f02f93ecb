"""Protocols by which the ranks of a prefill chain compute a layer and exchange its KV: Baton's protocol, two of the
KV-Runahead paper, and one for comparison."""

from baton.planning.cost_model import BATON, Kernel, Protocol, Receive

PAPER = Protocol(Kernel.DENSE, Receive.BLOCKING, skip_last=False, num_copies=2)
"""Protocol exactly as in table 5 of the KV-Runahead paper. Its order is: receive, project, concatenate, stack, send,
attend."""


PAPER_OVERLAPPED = Protocol(Kernel.DENSE, Receive.OVERLAPPED, skip_last=False)
"""Protocol of section 4.3 of the KV-Runahead paper. Receiving KV overlaps with the projections."""


STORE_AND_FORWARD = Protocol(Kernel.CAUSAL, Receive.LOCAL_FIRST)
"""Variant of Baton's protocol in which a rank sends the KV of a layer to the next rank only after it has received all
KV of this layer from the previous rank."""


PROTOCOLS = {
    "paper": PAPER,
    "paper-overlapped": PAPER_OVERLAPPED,
    "store-and-forward": STORE_AND_FORWARD,
    "baton": BATON,
}

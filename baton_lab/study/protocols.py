"""Protocols of chains by name: Baton's, the KV-Runahead paper's, and one for comparison."""

from baton.planning.cost_model import BATON, Kernel, Protocol, Receive

PAPER = Protocol(Kernel.DENSE, Receive.BLOCKING, skip_last=False, num_copies=2)
"""Protocol exactly as in table 5 of the KV-Runahead paper: receive, project, cat, stack, send, attend."""


PAPER_OVERLAPPED = Protocol(Kernel.DENSE, Receive.OVERLAPPED, skip_last=False)
"""Protocol of section 4.3 of the KV-Runahead paper: receives overlap with the projections."""


STORE_AND_FORWARD = Protocol(Kernel.CAUSAL, Receive.LOCAL_FIRST)
"""Baton's protocol with a relay that sends KV on only after it has received the whole layer."""


PROTOCOLS = {
    "paper": PAPER,
    "paper-overlapped": PAPER_OVERLAPPED,
    "store-and-forward": STORE_AND_FORWARD,
    "baton": BATON,
}

"""A prefill engine whose real links and senders are wrapped so that they fail by a plan."""

import threading
from concurrent.futures import Future

from baton.errors import ChainError, LinkBrokenError, TransferError
from baton.modeling.forward.decoder import Decoder
from baton.process.clock import Clock
from baton.types import Epoch, Rank, SampledToken, TokenRange
from baton_lab.chaos.faults import Fault, FaultPlan
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job, JobReport, KvSender
from prefill_workers.links import ConnectLinks, LinkHandler, LinkHeader, Links, Payload

SLOW_S = 0.05
"""Maximum delay of a slow call in seconds."""


class FaultyLinks:
    """Links that are slow, break, or stop delivering messages forever. Implements Links."""

    def __init__(self, inner: Links, handler: LinkHandler, plan: FaultPlan) -> None:
        self._inner = inner
        self._handler = handler
        self._plan = plan
        self._pause = threading.Event()
        self._silent = False

    @property
    def on_device(self) -> bool:
        return self._inner.on_device

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        strike = self._plan.next("link", (Fault.SLOW, Fault.REFUSE, Fault.DROP))
        if strike is not None and strike.fault is Fault.SLOW:
            self._pause.wait(strike.amount * SLOW_S)
        elif strike is not None and strike.fault is Fault.REFUSE:
            self._inner.close()
            self._tell(LinkBrokenError(f"the link to rank {target} broke: start the next epoch"))
            return
        elif strike is not None:
            self._silent = True
        if not self._silent:
            self._inner.send(target, header, payload)

    def close(self) -> None:
        self._inner.close()

    def wait_closed(self, timeout_s: float) -> bool:
        return self._inner.wait_closed(timeout_s)

    def _tell(self, error: ChainError) -> None:
        """Report an error to the handler on a thread of the links, as the port requires."""
        threading.Thread(target=self._handler.broken, args=(error,), name="faulty-link").start()


class FaultySender:
    """KvSender that is slow, raises errors, or pushes data twice. Implements KvSender."""

    def __init__(self, inner: KvSender, plan: FaultPlan, *, repeats: bool) -> None:
        """Wrap a sender. `repeats`: permission to push data twice. A sender that also stores the pushed KV does not
        accept repeated data."""
        self._inner = inner
        self._plan = plan
        self._pause = threading.Event()
        self._faults = (Fault.SLOW, Fault.REFUSE, *([Fault.TWICE] if repeats else []))

    @property
    def num_present(self) -> int:
        return self._inner.num_present

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        strike = self._plan.next("sender", self._faults)
        if strike is not None and strike.fault is Fault.SLOW:
            self._pause.wait(strike.amount * SLOW_S)
        elif strike is not None and strike.fault is Fault.REFUSE:
            raise TransferError(f"layer {layer} could not be pushed: retry as a new attempt")
        elif strike is not None:
            self._inner.push(layer, tokens, data)
        self._inner.push(layer, tokens, data)

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        self._inner.received(layer, tokens, data)

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        self._inner.finish(firsts)

    def abort(self, error: BaseException) -> None:
        self._inner.abort(error)


class FaultyEngine(PrefillEngine):
    """Prefill engine whose links and senders are wrapped."""

    def __init__(
        self, decoder: Decoder, clock: Clock, plan: FaultPlan, *, watchdog_floor_s: float, repeats: bool = True
    ) -> None:
        super().__init__(decoder, clock, PrefillConfig(watchdog_floor_s=watchdog_floor_s))
        self._plan = plan
        self._repeats = repeats

    def start_epoch(self, epoch: Epoch, rank: Rank, num_ranks: int, connect: ConnectLinks) -> None:
        def connect_faulty(handler: LinkHandler) -> Links:
            return FaultyLinks(connect(handler), handler, self._plan)

        super().start_epoch(epoch, rank, num_ranks, connect_faulty)

    def submit(self, job: Job, kv_sender: KvSender) -> "Future[JobReport]":
        return super().submit(job, FaultySender(kv_sender, self._plan, repeats=self._repeats))

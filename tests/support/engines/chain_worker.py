"""A prefill rank in a child process, controlled over a pipe, for tests that kill and stop it.

The parent sends commands. The child sends ("ready",) once, and then one message per event: see the methods of `Worker`.
"""

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.support.engines.chains import KeepingSender
from tests.support.links.link_groups import HOST

WAIT_S = 60.0
NUM_LAYERS = 4


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank."""

    error: str
    """Name of the error's class; empty if the job succeeded."""
    first_token: int | None = None
    pieces: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    """Pushed KV: (layer, first token, end token, bytes)."""


class Worker:
    """Parent's side of the pipe: the child process and the messages received from it."""

    def __init__(self, watchdog_floor_s: float, device: str = "cpu", communicators: str = "", gpu: int = 0) -> None:
        """Start the child process. `device`: name of the rank's device, as in `device_for_tests`. `communicators`: kind
        of those between devices, gloo or nccl; empty: none. `gpu`: index of the only GPU that the rank can use."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(theirs, watchdog_floor_s, device, communicators, gpu), daemon=True
        )
        self._process.start()
        theirs.close()
        self._told: list[tuple[Any, ...]] = []

    def wait_ready(self) -> None:
        self._wait_for("ready")

    def start_epoch(self, epoch: int, rank: int, num_ranks: int, port: int) -> None:
        self._pipe.send(("start_epoch", epoch, rank, num_ranks, port))

    def wait_epoch(self, epoch: int) -> None:
        self._wait_for("started", epoch)

    def submit(self, job: dict[str, Any], hold_layer: int | None = None) -> None:
        """Submit a job. In layer `hold_layer`, the rank stops at the push, sends ("holding", number), and waits for
        `release`."""
        self._pipe.send(("submit", job, hold_layer))

    def wait_holding(self, number: int) -> None:
        self._wait_for("holding", number)

    def release(self) -> None:
        self._pipe.send(("release",))

    def outcome(self, number: int) -> Outcome:
        outcome = self._wait_for("outcome", number)[2]
        assert isinstance(outcome, Outcome)
        return outcome

    def epoch_error(self) -> str:
        self._pipe.send(("status",))
        return str(self._wait_for("status")[1])

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Close the pipe, so that the process ends; kill it if it does not end in time."""
        if self._process.is_alive():
            self._pipe.close()
            self._process.join(10.0)
        if self._process.is_alive():
            self.kill()
        self._process.join()
        self._pipe.close()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _wait_for(self, *start: object) -> tuple[Any, ...]:
        while True:
            for told in self._told:
                if told[: len(start)] == start:
                    self._told.remove(told)
                    return told
            assert self._pipe.poll(WAIT_S), f"no {start} came"
            self._told.append(self._pipe.recv())


def _main(pipe: Connection, watchdog_floor_s: float, device: str, communicators: str, gpu: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)

    import torch

    from baton.process.clock import SystemClock
    from prefill_workers.config import PrefillConfig
    from prefill_workers.engine import PrefillEngine
    from tests.support.engines.devices import device_for_tests
    from tests.support.models.tiny_models import random_decoder

    torch.set_num_threads(1)
    decoder = random_decoder(num_layers=NUM_LAYERS, device=device_for_tests(device))
    engine = PrefillEngine(decoder, SystemClock(), PrefillConfig(watchdog_floor_s=watchdog_floor_s))
    rank = _Rank(engine, pipe, communicators)
    rank.tell("ready")
    try:
        while True:
            verb, *arguments = pipe.recv()
            getattr(rank, verb)(*arguments)
    except EOFError:
        rank.release()
        engine.close()


class _Rank:
    """Child's side of the pipe. Each method runs one command."""

    def __init__(self, engine: Any, pipe: Connection, communicators: str) -> None:
        self._engine = engine
        self._pipe = pipe
        self._edges = communicators
        self._lock = threading.Lock()
        self._released = threading.Event()

    def tell(self, *message: object) -> None:
        with self._lock:
            self._pipe.send(message)

    def start_epoch(self, epoch: int, rank: int, num_ranks: int, port: int) -> None:
        from baton.types import Epoch, Rank
        from prefill_workers.communicators import CommunicatorBackend, Rendezvous, backend_of
        from prefill_workers.links import LinkHandler, Links
        from prefill_workers.torch_links import connect_torch_links
        from tests.support.links.device_communicators import GlooBackend

        rendezvous = Rendezvous(Epoch(epoch), Rank(rank), num_ranks, f"{HOST}:{port}", HOST, WAIT_S)
        backend: CommunicatorBackend | None = GlooBackend(f"device-{rank}") if self._edges == "gloo" else None
        if self._edges == "nccl":
            backend = backend_of(self._engine.decoder.device)

        def connect(handler: LinkHandler) -> Links:
            links = connect_torch_links(rendezvous, handler, backend)
            assert links.on_device is bool(self._edges), "KV goes another way than the test says"
            return links

        self._engine.start_epoch(rendezvous.epoch, rendezvous.rank, num_ranks, connect)
        self.tell("started", epoch)

    def submit(self, fields: dict[str, Any], hold_layer: int | None) -> None:
        from prefill_workers.job import Job

        job = Job(**fields)
        self._released.clear()

        def hold(layer: int) -> None:
            if layer == hold_layer:
                self.tell("holding", job.number)
                assert self._released.wait(WAIT_S)

        kv_sender = KeepingSender(hold)
        future = self._engine.submit(job, kv_sender)
        future.add_done_callback(lambda done: self.tell("outcome", job.number, _outcome(done.exception(), kv_sender)))

    def release(self) -> None:
        self._released.set()

    def status(self) -> None:
        self.tell("status", self._engine.status().epoch_error)


def _outcome(error: BaseException | None, kv_sender: KeepingSender) -> Outcome:
    if error is not None:
        return Outcome(type(error).__name__)
    (firsts,) = kv_sender.finishes
    pieces = [(layer, tokens.start, tokens.end, bytes(data)) for layer, tokens, data in kv_sender.pieces]
    return Outcome("", firsts[0].token_id if firsts else None, pieces)

"""Decode steps of residency policies over a device's real link, on rows with KV of zeros."""

import contextlib
from collections.abc import Iterator

import torch

from baton.ids import SlotId
from baton.types import TokenRange
from benchmarks.device.rates import times_s
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvShape, Residency
from modeling.device.port import Device
from modeling.forward.decoder import Decoder


class PolicyRows:
    """Rows of one policy that take steps together. Make them with `opened`."""

    def __init__(self, decoder: Decoder, residency: Residency, lengths: list[int]) -> None:
        self._decoder, self._residency, self._lengths = decoder, residency, lengths
        self.step_bytes = 0
        """Bytes over the link in the last step."""

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, decoder: Decoder, device: Device, policy: str, lengths: list[int], num_steps: int
    ) -> Iterator["PolicyRows"]:
        """Open rows of `lengths` tokens with room for so many steps; release them afterwards."""
        layout, most = decoder.layout, max(lengths) + num_steps
        residency = make_residency(policy, KvShape(layout, decoder.config.windows, len(lengths), most), device)
        with contextlib.closing(residency), contextlib.ExitStack() as stack:
            for slot, length in enumerate(lengths):
                row = residency.open(SlotId(slot), length, length + num_steps)
                stack.callback(row.release)
                data = memoryview(bytes(length * layout.row_bytes))
                for layer in range(layout.num_layers):
                    row.write(layer, TokenRange(0, length), data)
            yield cls(decoder, residency, list(lengths))

    @torch.inference_mode()
    def step(self) -> None:
        """Run one step of one new token a row, and read the next tokens as an engine does."""
        before = self._residency.num_link_bytes
        rows = [(SlotId(slot), TokenRange(length, length + 1)) for slot, length in enumerate(self._lengths)]
        with self._residency.step(rows) as step:
            hidden_TD = self._decoder.forward([1] * len(rows), step.spans, step.turns)
        self._decoder.logits(hidden_TD).argmax(-1).tolist()
        self._lengths = [length + 1 for length in self._lengths]
        self.step_bytes = self._residency.num_link_bytes - before


def measure(decoder: Decoder, device: Device, policy: str, lengths: list[int], rounds: int) -> tuple[list[float], int]:
    """Return the milliseconds of a policy's steps, and the bytes over the link in the last one."""
    with PolicyRows.opened(decoder, device, policy, lengths, rounds + 1) as rows:
        return [1e3 * s for s in times_s(device, rows.step, rounds)], rows.step_bytes

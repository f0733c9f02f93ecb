"""Measures decode steps of the residency policies over the real link between host and device, with random KV.

The policy `infinigen` selects a tenth of the keys, based on a third of the columns of each head. The model's weights
are also random. Therefore the fraction of keys that stay selected from one step to the next differs from that of a real
model.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.kv.buffers import TORCH_DTYPES, bytes_of
from baton.modeling.sparse.bases import Basis, BasisKind
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import SlotId, TokenRange
from benchmarks.device.rates import times_s
from generate_workers.residency.policies import SelectionSource, make_residency
from generate_workers.residency.port import KvShape, Residency

_CHOICE = Selection(math.inf, 0.1, 4, 16)
_COLUMNS_SHARE = 0.3


@dataclass(frozen=True)
class FirstColumns(SelectionSource):
    """Key selection for `infinigen` that is not fitted to a text. It scores keys by only the first columns of each
    head."""

    def load(self) -> PreparedSelection:
        """Return a key selection for the decoder's model that scores keys by only the first columns of each head."""
        layout = self.decoder.layout
        shape = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.head_dim)
        whole_LGHR = torch.eye(layout.head_dim).expand(shape).contiguous()
        basis = Basis(BasisKind.COLUMNS, whole_LGHR, whole_LGHR).first(int(_COLUMNS_SHARE * layout.head_dim))
        return PreparedSelection(basis, _CHOICE, 1, layout.model_fingerprint, "")


class PolicyRows:
    """Batch of sequences whose KV is managed by one residency policy. Create with `opened`."""

    def __init__(self, decoder: Decoder, residency: Residency, lengths: list[int]) -> None:
        self._decoder, self._residency, self._lengths = decoder, residency, lengths
        self.step_bytes = 0
        """Number of bytes that crossed the link in the last step."""

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, decoder: Decoder, device: Device, policy: str, lengths: list[int], num_steps: int
    ) -> Iterator["PolicyRows"]:
        """Context manager. Open sequences with the given lengths in tokens, each with room for `num_steps` more tokens.
        Release the sequences on exit."""
        layout, most = decoder.layout, max(lengths) + num_steps
        shape = KvShape(layout, decoder.config.windows, len(lengths), most)
        residency = make_residency(policy, shape, device, FirstColumns(decoder))
        kv_S2GH = torch.randn(max(lengths), 2, layout.num_kv_heads, layout.head_dim).to(TORCH_DTYPES[layout.dtype])
        with contextlib.closing(residency), contextlib.ExitStack() as stack:
            for slot, length in enumerate(lengths):
                row = residency.open(SlotId(slot), length, length + num_steps)
                stack.callback(row.release)
                data = bytes_of(kv_S2GH[:length])
                for layer in range(layout.num_layers):
                    row.write(layer, TokenRange(0, length), data).result()
            yield cls(decoder, residency, list(lengths))

    @torch.inference_mode()
    def step(self) -> None:
        """Run one decode step, which yields one new token per sequence, and copy the tokens to the host as an engine
        does."""
        before = self._residency.num_link_bytes
        rows = [(SlotId(slot), TokenRange(length, length + 1)) for slot, length in enumerate(self._lengths)]
        with self._residency.step(rows) as step:
            hidden_TD = self._decoder.forward([1] * len(rows), step.spans, step.turns)
        self._decoder.logits(hidden_TD).argmax(-1).tolist()
        self._lengths = [length + 1 for length in self._lengths]
        self.step_bytes = self._residency.num_link_bytes - before


def measure(decoder: Decoder, device: Device, policy: str, lengths: list[int], rounds: int) -> tuple[list[float], int]:
    """Measure decode steps of a residency policy. Return the milliseconds of each step, and the number of bytes that
    crossed the link in the last step."""
    with PolicyRows.opened(decoder, device, policy, lengths, rounds + 1) as rows:
        return [1e3 * s for s in times_s(device, rows.step, rounds)], rows.step_bytes

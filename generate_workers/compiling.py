"""Compilation of the Triton kernels of an engine's steps, before the engine starts.

Triton compiles a kernel when it is launched for the first time with arguments of a new kind. Few steps suffice to
compile all kernels: block sizes depend on the longest possible sequence and not on the sequences of a step, and kernels
are not specialised on integers that differ between steps.
"""

from itertools import pairwise

import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kernels.triton.tiles import MOST_QUERIES
from baton.types import SlotId, TokenRange
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import Residency
from generate_workers.speculation.streaming_view import NarrowSpan

_WARM_UP_ENDS = 0, MOST_QUERIES + 1, MOST_QUERIES + 2, MOST_QUERIES + 3
"""Numbers of tokens of a sequence before and after each of the steps that compile kernels: a step with many new tokens,
and two steps with one new token."""


@torch.inference_mode()
def compile_steps(decoder: Decoder, residency: Residency, max_slot_tokens: int) -> None:
    """Run steps of one sequence in the first slot, so that all Triton kernels of the engine's steps are compiled. This
    takes about a second per kernel, the first time on a machine. Without this call, the first step that needs a kernel
    waits for its compilation, and so do all streams of the batch. Must be called before the engine starts. Does nothing
    if the decoder has no Triton kernels."""
    if not decoder.has_triton_rows:
        return
    ends = [min(end, max_slot_tokens) for end in _WARM_UP_ENDS]
    slot, has_windows = SlotId(0), any(window is not None for window in decoder.config.windows)
    row = residency.open(slot, ends[-1], ends[-1])
    for index, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            continue
        with residency.step([(slot, TokenRange(start, end))]) as step:
            spans = step.spans
            if isinstance(residency, PagedResidency) and index == 2 and not has_windows:
                spans = [NarrowSpan(spans[0], TokenRange(0, 1))]  # drafts attend to some of the keys
            decoder.logits(decoder.forward([0] * (end - start), spans, step.turns))
    row.release()

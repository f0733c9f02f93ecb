"""Compilation of the Triton kernels of an engine's steps, before the engine starts.

Triton compiles a kernel when it is launched for the first time with arguments of a new kind. Few steps suffice to
compile all kernels: block sizes depend on the longest possible sequence and not on the sequences of a step, and kernels
are not specialised on integers that differ between steps.
"""

import torch

from baton.errors import ConfigError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kernels.triton.tiles import MOST_QUERIES
from baton.modeling.kv.buffers import OUT_OF_MEMORY
from baton.types import SlotId, TokenRange
from generate_workers.config import EngineConfig
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import Residency
from generate_workers.speculation.streaming_view import NarrowSpan


@torch.inference_mode()
def compile_steps(decoder: Decoder, residency: Residency, config: EngineConfig) -> None:
    """Run steps of one sequence in the first slot, so that all Triton kernels of the engine's steps are compiled. This
    takes about a second per kernel, the first time on a machine. Without this call, the first step that needs a kernel
    waits for its compilation, and so do all streams of the batch. Must be called before the engine starts. Does nothing
    if the decoder has no Triton kernels. Raises ConfigError if there is too little memory."""
    if not decoder.has_triton_rows:
        return
    most = min(MOST_QUERIES + 1, config.max_batched_tokens, config.max_slot_tokens - 1)
    steps = [TokenRange(0, most), TokenRange(most, most + 1)]
    row = residency.open(SlotId(0), most + 1, most + 1)
    has_narrow_drafts = isinstance(residency, PagedResidency) and all(each is None for each in decoder.config.windows)
    try:
        for tokens in filter(len, steps):
            _run(decoder, residency, tokens, is_narrow=False)
        if has_narrow_drafts:
            _run(decoder, residency, steps[-1], is_narrow=True)
    except OUT_OF_MEMORY as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"kernels cannot be compiled ({why}): lower device_memory_bytes or kv_memory_bytes"
        ) from error
    finally:
        row.release()


def _run(decoder: Decoder, residency: Residency, tokens: TokenRange, *, is_narrow: bool) -> None:
    """Run a step of the sequence in the first slot. If `is_narrow` is True, the new token attends only to some of the
    keys, as in draft steps."""
    with residency.step([(SlotId(0), tokens)]) as step:
        spans = [NarrowSpan(step.spans[0], TokenRange(0, 1))] if is_narrow else step.spans
        decoder.logits(decoder.forward([0] * len(tokens), spans, step.turns))

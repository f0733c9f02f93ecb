"""Which engines run decode steps whole on their device, and the steps (`modeling.forward.step_graphs`).

`memory_limits` leaves room for them, and `servicer` makes them when the engine starts.
"""

import logging

from baton.clock import Clock
from baton.errors import ConfigError
from generate_workers.config import EngineConfig
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import Residency
from modeling.forward.decoder import Decoder
from modeling.forward.experts import LinearExperts, mixtures
from modeling.forward.step_graphs import StepGraphs, step_bytes
from modeling.forward.triton.rows import compile_rows
from modeling.kv.buffers import OUT_OF_MEMORY
from modeling.kv.pages import PAGE_TOKENS
from planning.speculation import MOST_DRAFTS

logger = logging.getLogger(__name__)

_ONE_QUERY = (1,)
_QUERIES = tuple(2**power for power in range(1 + MOST_DRAFTS.bit_length()))
"""Tokens of a row that kernels are compiled for: those up to a power of two have one, up to a token and its drafts."""


def device_step_bytes(decoder: Decoder, config: EngineConfig) -> int:
    """Return the bytes of the device that the steps are expected to take beside weights and KV; 0 where none run."""
    if not _wants_steps(decoder, config):
        return 0
    return step_bytes(decoder, config.num_slots, -(-config.max_slot_tokens // PAGE_TOKENS))


def make_device_steps(decoder: Decoder, residency: Residency, config: EngineConfig, clock: Clock) -> StepGraphs | None:
    """Capture the steps of an engine, for powers of two rows and for all slots; None for an engine that runs none. Logs
    how long it took. Blocks for as long: call before the engine starts. Raises ConfigError when they have no memory."""
    if not isinstance(residency, PagedResidency) or not _wants_steps(decoder, config):
        return None
    began_s, num_slots = clock.now_s(), config.num_slots
    pages_LPS2GH = residency.pool.memory.data_LPS2GH
    row_pages = -(-config.max_slot_tokens // residency.pool.page_tokens)
    sizes = [2**power for power in range(num_slots.bit_length()) if 2**power < num_slots] + [num_slots]
    captures = pages_LPS2GH.is_cuda
    try:
        made = StepGraphs(decoder, pages_LPS2GH, row_pages, sizes, captures=captures)
    except OUT_OF_MEMORY as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"steps of {num_slots} rows cannot be captured ({why}): lower device_memory_bytes or num_slots, or set "
            "step_graphs = false"
        ) from error
    if captures:
        most_queries = _ONE_QUERY if config.speculation == "off" else _QUERIES
        compile_rows(pages_LPS2GH, decoder.config.num_heads, decoder.config.windows, most_queries)
    done = "captured in CUDA graphs" if captures else "made"
    logger.info("decode steps of %s rows: %s in %.1f s", made.sizes, done, clock.now_s() - began_s)
    return made


def _wants_steps(decoder: Decoder, config: EngineConfig) -> bool:
    """Return whether rows of such an engine lie in pages for which the decoder has kernels in Triton."""
    is_asked_for = config.step_graphs and config.residency == "device"
    is_there = not decoder.device.is_home and decoder.has_triton_rows
    return is_asked_for and is_there and not _reads_on_host(decoder)


def _reads_on_host(decoder: Decoder) -> bool:
    """Return whether steps cannot be captured: the host reads how many tokens the experts of a mixture have."""
    is_cuda = decoder.weights.device.type == "cuda"
    return is_cuda and any(isinstance(each.products, LinearExperts) for each in mixtures(decoder.weights.layers))

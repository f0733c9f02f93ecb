"""Steps that run entirely on the device (`baton.modeling.forward.step_graphs`), for engines that support such steps.

`memory_limits` reserves memory for the steps. `servicer` captures the steps when the engine starts.
"""

import logging

from baton.errors import ConfigError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.experts import LinearExperts, mixtures
from baton.modeling.forward.step_graphs import StepGraphs, step_bytes, step_shapes
from baton.modeling.forward.triton.step_inputs import StepShape
from baton.modeling.kv.buffers import OUT_OF_MEMORY
from baton.modeling.kv.pages import PAGE_TOKENS
from baton.process.clock import Clock
from generate_workers.config import EngineConfig
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import Residency

logger = logging.getLogger(__name__)


def device_step_bytes(decoder: Decoder, config: EngineConfig) -> int:
    """Return the expected number of bytes of device memory that an engine's steps on the device need, in addition to
    weights and KV. Return 0 if the engine does not run its steps entirely on the device."""
    if not _wants_steps(decoder, config):
        return 0
    row_pages = -(-config.max_slot_tokens // PAGE_TOKENS)
    return step_bytes(decoder, _shapes(decoder, config), row_pages, PAGE_TOKENS)


def make_device_steps(decoder: Decoder, residency: Residency, config: EngineConfig, clock: Clock) -> StepGraphs | None:
    """Make the steps that an engine runs entirely on the device, and return them. On a GPU, they are captured in CUDA
    graphs. Return None if the engine does not run its steps entirely on the device. Logs the duration. Blocks, and must
    be called before the engine starts. Raises ConfigError if memory cannot be allocated."""
    if not isinstance(residency, PagedResidency) or not _wants_steps(decoder, config):
        return None
    began_s = clock.now_s()
    pages_LPS2GH = residency.pool.memory.data_LPS2GH
    row_pages = -(-config.max_slot_tokens // residency.pool.page_tokens)
    captures = pages_LPS2GH.is_cuda
    try:
        made = StepGraphs(decoder, pages_LPS2GH, row_pages, _shapes(decoder, config), captures=captures)
    except OUT_OF_MEMORY as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"steps of {config.num_slots} rows cannot be captured ({why}): lower device_memory_bytes or num_slots, or "
            "set step_graphs = false"
        ) from error
    done = "captured in CUDA graphs" if captures else "made"
    most_tokens, took_s = made.shapes[-1].num_tokens, clock.now_s() - began_s
    logger.info("steps of %d shapes, of up to %d tokens: %s in %.1f s", len(made.shapes), most_tokens, done, took_s)
    return made


def _shapes(decoder: Decoder, config: EngineConfig) -> list[StepShape]:
    return step_shapes(decoder, config.num_slots, config.max_batched_tokens, drafts=config.speculation != "off")


def _wants_steps(decoder: Decoder, config: EngineConfig) -> bool:
    """Return whether this engine stores KV in device pages for which the decoder has Triton kernels, and is configured
    to run steps on the device."""
    is_asked_for = config.step_graphs and config.residency == "device"
    is_there = not decoder.device.is_home and decoder.has_triton_rows
    return is_asked_for and is_there and not _reads_on_host(decoder)


def _reads_on_host(decoder: Decoder) -> bool:
    """Return whether steps cannot be captured, because the host reads the number of tokens of each expert."""
    is_cuda = decoder.weights.device.type == "cuda"
    return is_cuda and any(isinstance(each.products, LinearExperts) for each in mixtures(decoder.weights.layers))

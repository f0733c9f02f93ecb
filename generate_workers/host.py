"""Starts one generation engine in the calling process: loads its model and starts its server.

`deploy.groups.hosting` calls this module in a child process or in a Ray actor. The module depends on neither. It starts
`generate_workers.servicer`, and runs on the asyncio loop of the process.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.hosting import LoadedModel, prefix_place, prepare_kernels
from baton.modeling.prefix_store.folder import sweep
from baton.planning.device_profile import DeviceProfile
from baton.process.clock import SystemClock
from baton.process.cores import give_way_to
from baton.process.garbage import collect_rarely
from baton.process.own_thread import in_own_thread
from baton.settings.place import WorkerPlace
from baton.text.core_tokenizer import CoreTokenizer
from baton.text.kept_core import load_core
from generate_workers.config import EngineConfig
from generate_workers.engine.served_model import ServedModel
from generate_workers.servicer import GenerationServer

logger = logging.getLogger(__name__)


async def start_engine(
    place: WorkerPlace, config: EngineConfig, model: LoadedModel | None = None, profile: DeviceProfile | None = None
) -> GenerationServer:
    """Start a generation engine and return its server, which accepts calls. The model is loaded, unless `model` already
    has it. The engine reports `profile`, the profile of its device. Raises ModelError or ConfigError with one line of
    text."""
    decoder = await in_own_thread(partial((model or LoadedModel()).load, place))
    tokenizer = await asyncio.to_thread(load_core, place.model_folder)
    draft_model = await in_own_thread(partial(_load_draft_model, place, config, decoder, tokenizer))
    server = await GenerationServer.start(
        ServedModel(decoder, tokenizer, draft_model, profile),
        place,
        replace(config, max_slot_tokens=min(config.max_slot_tokens, decoder.config.max_position)),
        clock=SystemClock(),
        prefix_place=prefix_place(place),
    )
    if place.cores:  # no other process uses these cores, but receiving pushes on them would delay tokens
        give_way_to(server.engine.thread_id)
    await asyncio.to_thread(sweep)  # after this process's own folder was marked as in use
    collect_rarely()
    return server


def _load_draft_model(
    place: WorkerPlace, config: EngineConfig, decoder: Decoder, tokenizer: CoreTokenizer
) -> Decoder | None:
    """Load the draft model with the model's dtype and form of weights; None if none is configured. Blocks. Raises
    ModelError, and ConfigError for a draft model with another vocabulary or tokenizer."""
    if not config.draft_model:
        return None
    folder = Path(config.draft_model)
    draft_model = load_decoder(folder, dtype=place.dtype, device=decoder.device, weights=place.weights, shared=True)
    sizes = draft_model.config.vocab_size, decoder.config.vocab_size
    if sizes[0] != sizes[1]:
        what = f"vocabularies of {sizes[0]} and {sizes[1]} tokens"
    elif not tokenizer.has_tokens_of(load_core(folder)):
        what = "different tokenizers"
    else:
        prepare_kernels(draft_model)
        return draft_model
    raise ConfigError(
        f"draft_model {folder} and the model {place.model_folder} have {what}: use a draft_model of the same family"
    )

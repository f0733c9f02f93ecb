"""Makes the speculation that an engine is configured for."""

import torch

from baton.clock import Clock
from baton.errors import ConfigError
from generate_workers.config import EngineConfig
from generate_workers.engine.step_bound import model_shape
from generate_workers.engine.step_runner import bytes_per_step
from generate_workers.residency.host import HostResidency
from generate_workers.residency.port import DraftKeys
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.acceptance import Acceptances
from generate_workers.speculation.beside import BesideView
from generate_workers.speculation.ngrams import NgramDrafter
from generate_workers.speculation.self_drafts import DraftView, SelfDrafter
from generate_workers.speculation.speculator import Source, Speculator
from generate_workers.speculation.streaming import StreamingView
from modeling.forward.decoder import Decoder
from planning.hardware import cpu_rank
from planning.speculation import MOST_DRAFTS
from planning.step_costs import StepCosts


def make_speculation(decoder: Decoder, slots: SlotTable, config: EngineConfig, clock: Clock) -> Speculator | None:
    """Return the speculation of an engine over these slots; None when it is off. Raises ConfigError where it is asked
    for by name and cannot be: over approximate KV, and over few keys for a model with sliding windows."""
    name, residency = config.speculation, slots.memory.residency
    if name == "off" or (name == "auto" and not residency.traits.is_exact):
        return None
    if not residency.traits.is_exact:
        raise ConfigError(
            f"speculation = {name!r} verifies with all KV, and residency {residency.traits.name} attends to a part of "
            "it: use residency device or host, or speculation off"
        )
    sources = {"ngram": Source(NgramDrafter(), Acceptances(0.5))}
    if all(window is None for window in decoder.config.windows):
        keys = DraftKeys.of(config.draft_keys, MOST_DRAFTS)
        view: DraftView = StreamingView(residency, keys)
        if isinstance(residency, HostResidency):
            view = BesideView(residency)
        drafter = SelfDrafter(decoder, view, keeps=config.acceptance == "maximal")
        sources["streaming"] = Source(drafter, Acceptances(0.8), config.draft_keys)
    if name != "auto" and name not in sources:
        raise ConfigError(
            f"speculation = {name!r} is not there for models with sliding windows: use speculation ngram, auto or off"
        )
    chosen = list(sources.values()) if name == "auto" else [sources[name]]
    shape = model_shape(decoder.config, decoder.dtype.itemsize)
    rates = cpu_rank(torch.get_num_threads(), shape.dtype_bytes)
    costs = StepCosts(shape, rates, weight_bytes=bytes_per_step(decoder.weights))
    return Speculator(chosen, slots, costs, clock, config.draft_tokens or None)

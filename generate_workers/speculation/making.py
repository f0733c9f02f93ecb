"""Construction of an engine's speculation (source of drafts), as named in the configuration."""

from collections.abc import Callable, Mapping

from baton.errors import ConfigError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.step_graphs import StepGraphs
from baton.modeling.forward.weight_sizes import bytes_per_step
from baton.planning.speculation import MOST_DRAFTS
from generate_workers.config import EngineConfig
from generate_workers.engine.served_model import ServedModel, step_cost
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.host import HostResidency
from generate_workers.residency.port import DraftKeys
from generate_workers.residency.sparse.draft_index import IndexedResidency
from generate_workers.residency.sparse.selective import NO_CHOSEN_DRAFTS, require_selective
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.acceptance import Acceptances
from generate_workers.speculation.draft_model import ModelProposer
from generate_workers.speculation.infinigen_view import InfinigenView
from generate_workers.speculation.ngrams import KINDS, NgramProposer
from generate_workers.speculation.self_drafts import DraftView, SelfProposer
from generate_workers.speculation.snapkv import SnapKvView
from generate_workers.speculation.speculator import DraftSource, Speculator
from generate_workers.speculation.streaming_view import DraftWindowView, StreamingView

_SELF_ACCEPTED = 0.8
"""Initial estimate of the probability that a draft made by the model itself is accepted."""
_MODEL_ACCEPTED = 0.6
"""Initial estimate of the probability that a draft made by a draft model is accepted."""
_LEAST_DIVIDED_KEYS = 32
"""Smallest value of the setting `draft_keys` (number of keys of a draft step) for which two other numbers of keys are
tried: half of `draft_keys`, and twice `draft_keys`. With a smaller value, draft steps always attend to `draft_keys`
keys."""
MakeChoosing = Callable[[Decoder, DeviceResidency, EngineConfig], DraftView]


def _infinigen(decoder: Decoder, residency: DeviceResidency, config: EngineConfig) -> DraftView:
    assert isinstance(residency, IndexedResidency), "the residency was made without partial keys"
    return InfinigenView(residency, config.draft_keys)


CHOOSING: Mapping[str, MakeChoosing] = {
    "snapkv": lambda decoder, residency, config: SnapKvView(
        decoder, residency, DraftKeys.of(config.draft_keys, MOST_DRAFTS)
    ),
    "infinigen": _infinigen,
}
"""Factories of draft views that select keys, keyed by the value of the setting `speculation`."""


def make_speculation(
    model: ServedModel,
    slots: SlotTable,
    config: EngineConfig,
    *,
    name: str = "",
    choosing: Mapping[str, MakeChoosing] = CHOOSING,
    device_steps: StepGraphs | None = None,
) -> Speculator | None:
    """Return the object that plans and makes the drafts for the sequences in `slots`; None if speculation is off.
    `name`: kind of speculation to use; empty: the configured one. `choosing`: factories of draft views that select
    keys, keyed by kind of speculation. `device_steps`: steps that run entirely on the device; None: no such steps.

    Raises ConfigError if the kind of speculation is not supported. Every kind requires a residency that attends to all
    KV. A kind whose drafts attend to few keys requires a model without sliding windows. A kind whose drafts select keys
    by scores requires that all keys are on the device.
    """
    decoder, draft_model = model.decoder, model.draft_model
    name, residency = name or config.speculation, slots.memory.residency
    if name == "off" or (name == "auto" and not residency.traits.is_exact):
        return None
    if not residency.traits.is_exact:
        raise ConfigError(
            f"speculation = {name!r} verifies with all KV, and residency {residency.traits.name} attends to a part of "
            "it: use residency device or host, or speculation off"
        )
    num_rows = slots.num_slots
    sources = {"ngram": DraftSource(NgramProposer(), Acceptances(list(KINDS.values()), num_rows))}
    keys = slots.memory.shape.draft_keys
    if keys is not None and all(window is None for window in decoder.config.windows):
        view: DraftView = StreamingView(residency, keys)
        if isinstance(residency, HostResidency):
            view = DraftWindowView(residency)
        budgets = _budgets(config) if isinstance(view, StreamingView) else {config.draft_keys: _SELF_ACCEPTED}
        keeps = config.acceptance == "maximal"
        proposer = SelfProposer(decoder, view, list(budgets), keeps=keeps, device_steps=device_steps)
        acceptances = Acceptances(list(budgets.values()), num_rows)
        sources["streaming"] = DraftSource(proposer, acceptances, config.draft_keys)
    if name in choosing:
        residency = _require_choosing(name, decoder, slots)
        view = choosing[name](decoder, residency, config)
        proposer = SelfProposer(decoder, view, [config.draft_keys], keeps=config.acceptance == "maximal")
        sources[name] = DraftSource(proposer, Acceptances([_SELF_ACCEPTED], num_rows), config.draft_keys)
    if name == "model":
        assert draft_model is not None, f"{config.draft_model} was not loaded"
        sources["model"] = _by_model(draft_model, config)
    if name != "auto" and name not in sources:
        raise ConfigError(
            f"speculation = {name!r} is not supported with sliding windows: use speculation ngram, auto or off"
        )
    chosen: dict[str, DraftSource] = sources if name == "auto" else {name: sources[name]}
    drafting = draft_model or decoder
    return Speculator(
        chosen,
        slots,
        model.step_cost,
        draft_model_cost=None if draft_model is None else step_cost(draft_model, model.profile),
        draft_bytes=(drafting.layout.token_bytes, bytes_per_step(drafting.weights)),
        fixed_drafts=config.draft_tokens or None,
    )


def _budgets(config: EngineConfig) -> dict[int, float]:
    """Return the numbers of keys that drafts may attend to, each with an initial estimate of acceptance. The configured
    number of keys is the first. If the number of drafts is planned and not fixed, half and twice the configured number
    of keys follow."""
    configured = {config.draft_keys: _SELF_ACCEPTED}
    if config.draft_tokens or config.draft_keys < _LEAST_DIVIDED_KEYS:
        return configured
    return configured | {config.draft_keys // 2: 0.76, config.draft_keys * 2: 0.83}


def _by_model(draft_model: Decoder, config: EngineConfig) -> DraftSource:
    """Return the source of drafts by a draft model. Raises ConfigError for a model with sliding windows."""
    if any(window is not None for window in draft_model.config.windows):
        raise ConfigError(
            f"draft_model = {config.draft_model!r} has sliding windows, and drafts keep first and latest keys: use"
            " another draft_model, or speculation auto, ngram or off"
        )
    keys = DraftKeys.of(config.draft_keys, MOST_DRAFTS)
    make_memory, keeps = draft_model.device.row_memory, config.acceptance == "maximal"
    proposer = ModelProposer(draft_model, keys, config.num_slots, make_memory, keeps=keeps)
    return DraftSource(proposer, Acceptances([_MODEL_ACCEPTED], config.num_slots), config.draft_keys)


def _require_choosing(name: str, decoder: Decoder, slots: SlotTable) -> DeviceResidency:
    """Return the residency from whose keys drafts select. Raises ConfigError if that is not supported."""
    residency = slots.memory.residency
    require_selective(f"speculation = {name!r}", slots.memory.shape, decoder.device, NO_CHOSEN_DRAFTS)
    if not isinstance(residency, DeviceResidency):
        raise ConfigError(
            f"speculation = {name!r} chooses among keys on the device, and residency {residency.traits.name} keeps "
            "them elsewhere: use residency device, or speculation auto, streaming, ngram or off"
        )
    return residency

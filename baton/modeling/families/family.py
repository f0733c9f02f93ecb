"""Interface of a model family, and the loading functions that families share.

To add a family, add three parts:

1. A module in this folder with a class that reads a config (`Fields`) and builds layers
   (`baton.modeling.forward.layers`) from a `Checkpoint`.
2. A line in the table of `baton.modeling.checkpoints.registry`.
3. Golden tests.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.forward.decoder import DecoderWeights
from baton.modeling.forward.layers import ACTIVATIONS, Layer, PlainMlp
from baton.modeling.forward.linear import Linear, PanelLinear, TorchLinear, make_linear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import LayerNorm, Transform
from baton.modeling.forward.positions import PositionTable

HEAD = "lm_head"
"""Name of the output head's module, in all families. It may be missing if the head is tied to the embedding."""


class Family(Protocol):
    """Model as its config.json describes it. Implementations are frozen dataclasses whose fields contain the settings
    that `load` needs."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    """Declaration for type checkers: all implementations are dataclasses."""

    @property
    def config(self) -> ModelConfig:
        """Return the properties of the model that modules outside the family may use, such as its sizes."""

    def load(self, checkpoint: Checkpoint) -> DecoderWeights:
        """Load all tensors and build the layers. Raises ModelError for a tensor that does not fit the config."""


def load_linear(
    checkpoint: Checkpoint,
    rows: Mapping[str, int],
    columns: int,
    bias: bool,
    *,
    gated: bool = False,
    has_many_rows: bool = True,
) -> Linear:
    """Load several modules as one linear layer, concatenated along the rows. `rows` maps module names to their numbers
    of rows. If `gated` is set, the first half of the outputs gates the second half. `has_many_rows`: see
    `make_linear`."""
    bias_N = _load_bias(checkpoint, rows) if bias else None
    codes = checkpoint.codes([(name, (count, columns)) for name, count in rows.items()])
    if codes is not None:
        return PanelLinear(codes, bias_N, gated)
    weight = _load_weight(checkpoint, rows, columns)
    return make_linear(weight, bias_N, gated=gated, int8=checkpoint.int8, has_many_rows=has_many_rows)


def load_parameters(
    checkpoint: Checkpoint, rows: Mapping[str, int], columns: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Load several modules and return `(weight, bias)`, concatenated along the rows. `rows` maps module names to their
    numbers of rows. The bias is None if `bias` is False."""
    return _load_weight(checkpoint, rows, columns), _load_bias(checkpoint, rows) if bias else None


def _load_weight(checkpoint: Checkpoint, rows: Mapping[str, int], columns: int) -> Tensor:
    return checkpoint.fuse([(f"{name}.weight", (count, columns)) for name, count in rows.items()])


def _load_bias(checkpoint: Checkpoint, rows: Mapping[str, int]) -> Tensor:
    return checkpoint.fuse([(f"{name}.bias", (count,)) for name, count in rows.items()])


def load_layer_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> LayerNorm:
    """Load a layer norm with gain and bias."""
    return LayerNorm(checkpoint.take(f"{name}.weight", (size,)), checkpoint.take(f"{name}.bias", (size,)), eps)


def load_plain_mlp(
    checkpoint: Checkpoint, names: tuple[str, str], config: ModelConfig, activation: str, bias: bool
) -> PlainMlp:
    """Load an MLP without a gate: an up projection, an activation and a down projection. `names` contains the names of
    the two projections."""
    (up, down), hidden, inner = names, config.hidden_size, config.intermediate_size
    return PlainMlp(
        load_linear(checkpoint, {up: inner}, hidden, bias),
        ACTIVATIONS[activation],
        load_linear(checkpoint, {down: hidden}, inner, bias),
    )


def load_ends(checkpoint: Checkpoint, config: ModelConfig, name: str, width: int) -> tuple[Linear, Linear]:
    """Load the embedding and the output head, both with a weight of shape `[V, width]`, V the vocabulary size. `name`
    is the embedding's module. If the head shares the embedding's weight, both are the same object."""
    shape = config.vocab_size, width
    if not config.tie_embeddings:
        embedding = checkpoint.codes([(name, shape)])
        table = TorchLinear(checkpoint.take(f"{name}.weight", shape)) if embedding is None else PanelLinear(embedding)
        return table, _load_head(checkpoint, HEAD, shape)
    head = _load_head(checkpoint, name, shape)
    checkpoint.expect_equal(f"{HEAD}.weight", f"{name}.weight")
    return head, head


def _load_head(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Linear:
    """Load an output head. It computes only the rows that need logits, not all tokens of a prompt."""
    num_rows, width = shape
    return load_linear(checkpoint, {name: num_rows}, width, bias=False, has_many_rows=False)


def compose(
    model: Family,
    checkpoint: Checkpoint,
    ends: tuple[Linear, Linear],
    *,
    positions: PositionTable,
    layers: Sequence[Layer],
    final_norm: Transform,
    embedding_scale: float = 1.0,
) -> DecoderWeights:
    """Return a model's weights, composed of its parts. Call it after all tensors have been loaded.

    `ends` contains the embedding and the output head, as `load_ends` returns them. `embedding_scale` is rounded to the
    dtype of the weights. The fingerprint of the result is a hash of the tensors and of all settings that affect the KV.
    """
    embedding, head = ends
    config = dataclasses.replace(model.config, eos_token_ids=(), bos_token_id=None)
    return DecoderWeights(
        device=checkpoint.device,
        dtype=checkpoint.dtype,
        embedding=embedding,
        positions=positions,
        layers=tuple(layers),
        final_norm=final_norm,
        head=head,
        fingerprint=checkpoint.seal(str(dataclasses.replace(model, config=config))),
        embedding_scale=float(torch.tensor(embedding_scale, dtype=checkpoint.dtype)),
    )

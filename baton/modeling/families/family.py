"""Interface that each model family implements, and the loading code that families share.

A new family needs three things: a module in this folder whose class reads a config (`Fields`) and composes
`baton.modeling.forward.layers` from a `Checkpoint`, a line in the table of `baton.modeling.checkpoints.registry`, and
golden tests.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.forward.decoder import DecoderWeights
from baton.modeling.forward.layers import ACTIVATIONS, Layer, PlainMlp
from baton.modeling.forward.linear import Linear, TorchLinear, make_linear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import LayerNorm, Transform
from baton.modeling.forward.positions import PositionTable

HEAD = "lm_head.weight"
"""Name of the output head's tensor in every family, if the head is not tied."""


class Family(Protocol):
    """One model as its config.json describes it. Implementations are frozen dataclasses of the settings that `load`
    uses."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    """Declares to type checkers that implementations are dataclasses."""

    @property
    def config(self) -> ModelConfig:
        """Return the properties of the model that other modules may use."""

    def load(self, checkpoint: Checkpoint) -> DecoderWeights:
        """Load all tensors and compose the layers. Raises ModelError for a tensor that does not fit."""


def load_linear(
    checkpoint: Checkpoint, rows: Mapping[str, int], columns: int, bias: bool, *, gated: bool = False
) -> Linear:
    """Load several modules into one linear layer, concatenated along the rows. `rows`: number of rows by
    module name."""
    return make_linear(*load_parameters(checkpoint, rows, columns, bias), gated=gated, int8=checkpoint.int8)


def load_parameters(
    checkpoint: Checkpoint, rows: Mapping[str, int], columns: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Load several modules, concatenated along the rows, and return `(weight, bias or None)`. `rows`: number of rows by
    module name."""
    weight = checkpoint.fuse([(f"{name}.weight", (count, columns)) for name, count in rows.items()])
    return weight, checkpoint.fuse([(f"{name}.bias", (count,)) for name, count in rows.items()]) if bias else None


def load_layer_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> LayerNorm:
    """Load a layer norm with gain and bias."""
    return LayerNorm(checkpoint.take(f"{name}.weight", (size,)), checkpoint.take(f"{name}.bias", (size,)), eps)


def load_plain_mlp(
    checkpoint: Checkpoint, names: tuple[str, str], config: ModelConfig, activation: str, bias: bool
) -> PlainMlp:
    """Load an MLP with two projections, up and down, and an activation between them. `names`: names of
    the projections."""
    (up, down), hidden, inner = names, config.hidden_size, config.intermediate_size
    return PlainMlp(
        load_linear(checkpoint, {up: inner}, hidden, bias),
        ACTIVATIONS[activation],
        load_linear(checkpoint, {down: hidden}, inner, bias),
    )


def load_ends(checkpoint: Checkpoint, config: ModelConfig, name: str, width: int) -> tuple[Tensor, Tensor | None]:
    """Load the embedding `name` and the output head, both `[V, width]`. The head is None if it shares the embedding's
    weight."""
    embedding = checkpoint.take(name, (config.vocab_size, width))
    if not config.tie_embeddings:
        return embedding, checkpoint.take(HEAD, (config.vocab_size, width))
    checkpoint.expect_equal(HEAD, name)
    return embedding, None


def compose(
    model: Family,
    checkpoint: Checkpoint,
    ends: tuple[Tensor, Tensor | None],
    *,
    positions: PositionTable,
    layers: Sequence[Layer],
    final_norm: Transform,
    embedding_scale: float = 1.0,
) -> DecoderWeights:
    """Return a model's weights. All tensors must have been loaded. `ends`: embedding and head; the head is None if it
    shares the embedding's weight. The fingerprint covers the tensors and the settings that change KV. `embedding_scale`
    is rounded to the weights' dtype, in which the embeddings are scaled."""
    embedding_VD, head_VD = ends
    # A head computes only the rows that need logits, not all tokens of a prompt.
    head = make_linear(embedding_VD if head_VD is None else head_VD, int8=checkpoint.int8, has_many_rows=False)
    config = dataclasses.replace(model.config, eos_token_ids=(), bos_token_id=None)
    return DecoderWeights(
        device=embedding_VD.device,
        dtype=embedding_VD.dtype,
        embedding=head if head_VD is None else TorchLinear(embedding_VD),
        positions=positions,
        layers=tuple(layers),
        final_norm=final_norm,
        head=head,
        fingerprint=checkpoint.seal(str(dataclasses.replace(model, config=config))),
        embedding_scale=float(torch.tensor(embedding_scale, dtype=embedding_VD.dtype)),
    )

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
from baton.modeling.forward.linear import Linear, TorchLinear, make_linear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import LayerNorm, Transform
from baton.modeling.forward.positions import PositionTable

HEAD = "lm_head.weight"
"""Name of the output head's tensor, in all families. The tensor may be missing if the head is tied to the embedding."""


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
    checkpoint: Checkpoint, rows: Mapping[str, int], columns: int, bias: bool, *, gated: bool = False
) -> Linear:
    """Load several modules as one linear layer, concatenated along the rows. `rows` maps module names to their numbers
    of rows. If `gated` is set, the first half of the outputs gates the second half."""
    return make_linear(*load_parameters(checkpoint, rows, columns, bias), gated=gated, int8=checkpoint.int8)


def load_parameters(
    checkpoint: Checkpoint, rows: Mapping[str, int], columns: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Load several modules and return `(weight, bias)`, concatenated along the rows. `rows` maps module names to their
    numbers of rows. The bias is None if `bias` is False."""
    weight = checkpoint.fuse([(f"{name}.weight", (count, columns)) for name, count in rows.items()])
    return weight, checkpoint.fuse([(f"{name}.bias", (count,)) for name, count in rows.items()]) if bias else None


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


def load_ends(checkpoint: Checkpoint, config: ModelConfig, name: str, width: int) -> tuple[Tensor, Tensor | None]:
    """Load the embedding `name` and the output head, both of shape `[V, width]`, V the vocabulary size. The head is
    None if it shares the embedding's weight."""
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
    """Return a model's weights, composed of its parts. Call it after all tensors have been loaded.

    `ends` contains the embedding and the output head. The head is None if it shares the embedding's weight.
    `embedding_scale` is rounded to the dtype of the weights. The fingerprint of the result is a hash of the tensors and
    of all settings that affect the KV.
    """
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

"""The port that each model family implements, and the loading code that families share.

A family joins in three steps: a module here whose class reads a config (`Fields`) and composes
`modeling.forward.layers` from a `Checkpoint`; a line in `modeling.checkpoints.registry`'s table; golden tests.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from modeling.families.checkpoint import Checkpoint
from modeling.forward.decoder import DecoderWeights
from modeling.forward.linear import Linear, TorchLinear, make_linear
from modeling.forward.model_config import ModelConfig
from modeling.forward.norms import LayerNorm

HEAD = "lm_head.weight"
"""Name of the output head's tensor in every family, where it is not tied."""


class Family(Protocol):
    """One model, as its config.json describes it: a frozen dataclass of switches that its `load` obeys."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    """Declares to type checkers that implementations are dataclasses."""

    @property
    def config(self) -> ModelConfig:
        """Return the facts of the model that other parts may use."""
        ...

    def load(self, checkpoint: Checkpoint) -> DecoderWeights:
        """Take all tensors and compose the layers; raises ModelError for a tensor that does not fit."""
        ...


def seal(checkpoint: Checkpoint, model: Family) -> str:
    """Return the fingerprint of all tensors taken and of the model's switches, as far as they change KV."""
    config = dataclasses.replace(model.config, eos_token_ids=(), bos_token_id=None)
    return checkpoint.seal(str(dataclasses.replace(model, config=config)))


def load_linear(
    checkpoint: Checkpoint, rows: Mapping[str, int], columns: int, bias: bool, *, gated: bool = False
) -> Linear:
    """Load modules into one linear layer, fused one below the other; `rows` gives each module's rows by name."""
    return make_linear(*load_parameters(checkpoint, rows, columns, bias), gated=gated, int8=checkpoint.int8)


def load_parameters(
    checkpoint: Checkpoint, rows: Mapping[str, int], columns: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Load modules fused one below the other, as `(weight, bias or None)`; `rows` gives each module's rows by name."""
    weight = checkpoint.fuse([(f"{name}.weight", (count, columns)) for name, count in rows.items()])
    return weight, checkpoint.fuse([(f"{name}.bias", (count,)) for name, count in rows.items()]) if bias else None


def load_layer_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> LayerNorm:
    """Load a layer norm with gain and bias."""
    return LayerNorm(checkpoint.take(f"{name}.weight", (size,)), checkpoint.take(f"{name}.bias", (size,)), eps)


def load_head(checkpoint: Checkpoint, config: ModelConfig, embedding_name: str, shape: Sequence[int]) -> Tensor | None:
    """Load the output head `[V, D]`; None when it is tied: the embedding itself."""
    if not config.tie_embeddings:
        return checkpoint.take(HEAD, tuple(shape))
    checkpoint.expect_equal(HEAD, embedding_name)
    return None


def make_ends(embedding_VD: Tensor, head_VD: Tensor | None, int8: bool) -> tuple[Linear, Linear]:
    """Return a model's embedding and head: one object when tied (None), so that the weight is kept once. A head
    computes only rows that get a token, not those of a prompt."""
    if head_VD is None:
        tied = make_linear(embedding_VD, int8=int8, has_many_rows=False)
        return tied, tied
    return TorchLinear(embedding_VD), make_linear(head_VD, int8=int8, has_many_rows=False)

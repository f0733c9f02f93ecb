"""The OPT family (Zhang et al., 2022): layer norms, learned positions, and an MLP without a gate. Includes the variants
opt-350m and Galactica.

Shape letters: V vocabulary size, E width of the embedding table, D hidden size.
"""

from dataclasses import dataclass

from torch import Tensor

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.families.family import HEAD, compose, load_ends, load_layer_norm, load_linear, load_plain_mlp
from baton.modeling.families.fields import Fields
from baton.modeling.forward.decoder import DecoderWeights
from baton.modeling.forward.layers import ACTIVATIONS, Layer, PostNorm, Sequential
from baton.modeling.forward.linear import Linear, TorchLinear, make_linear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import LayerNorm, Transform, unchanged
from baton.modeling.forward.positions import LearnedTable

_NORM_EPS = 1e-5
"""Epsilon of the layer norms. It is the default of torch, and no config field changes it."""
_FIRST_POSITION = 2
"""Index of the row for position 0 in the position table. The rows before it are not used."""


@dataclass(frozen=True)
class OptModel:
    """A model of the OPT family."""

    config: ModelConfig
    embedding_size: int
    """Width of the embedding table. If it differs from the hidden size (opt-350m), two projections convert between the
    widths."""
    activation: str
    norm_first: bool
    """True if a norm precedes attention and MLP. False if a norm follows each residual sum (opt-350m)."""
    final_norm: bool
    bias: bool
    """True if all projections have a bias. False for Galactica."""
    norm_parameters: bool
    """True if the norms have gain and bias. False for Galactica."""

    @classmethod
    def read(cls, fields: Fields) -> "OptModel":
        """Read the model from config.json. Raises ModelError if a field is missing, invalid or not supported."""
        config = _read_config(fields)
        norm_first = fields.flag("do_layer_norm_before", default=True)
        return cls(
            config,
            embedding_size=fields.count("word_embed_proj_dim", config.hidden_size),
            activation=fields.choice("activation_function", ACTIVATIONS, "relu"),
            norm_first=norm_first,
            final_norm=norm_first and not fields.flag("_remove_final_layer_norm"),
            bias=fields.flag("enable_bias", default=True),
            norm_parameters=fields.flag("layer_norm_elementwise_affine", default=True),
        )

    def load(self, checkpoint: Checkpoint) -> DecoderWeights:
        """Load the model. Projections between embedding width and hidden size, if there are any, are multiplied into
        the embedding and the head. Tensor names may lack the prefix `model.`, as in checkpoints of the base model."""
        config = self.config
        at = "decoder" if checkpoint.has("decoder.embed_tokens.weight") else "model.decoder"
        if self.embedding_size == config.hidden_size:
            ends = load_ends(checkpoint, config, f"{at}.embed_tokens", config.hidden_size)
        else:
            ends = self._projected_ends(checkpoint, at)
        num_rows = _FIRST_POSITION + config.max_position
        rows_PD = checkpoint.take(f"{at}.embed_positions.weight", (num_rows, config.hidden_size))
        return compose(
            *(self, checkpoint, ends),
            positions=LearnedTable(rows_PD[_FIRST_POSITION:]),
            layers=[self._layer(checkpoint, f"{at}.layers.{layer}") for layer in range(config.num_layers)],
            final_norm=self._norm(checkpoint, f"{at}.final_layer_norm") if self.final_norm else unchanged,
        )

    def _projected_ends(self, checkpoint: Checkpoint, at: str) -> tuple[Linear, Linear]:
        """Load the embedding and the head of a model whose embedding has another width than its hidden states."""
        config, width = self.config, self.embedding_size
        name = f"{at}.embed_tokens.weight"
        embedding_VE = head_VE = checkpoint.take(name, (config.vocab_size, width))
        if config.tie_embeddings:
            checkpoint.expect_equal(f"{HEAD}.weight", name)
        else:
            head_VE = checkpoint.take(f"{HEAD}.weight", (config.vocab_size, width))
        project_in = checkpoint.take(f"{at}.project_in.weight", (config.hidden_size, width))
        project_out = checkpoint.take(f"{at}.project_out.weight", (width, config.hidden_size))
        head_VD = _product(head_VE, project_out)
        head = make_linear(head_VD, int8=checkpoint.int8, has_many_rows=False)
        return TorchLinear(_product(embedding_VE, project_in.T)), head

    def _layer(self, checkpoint: Checkpoint, at: str) -> Layer:
        hidden = self.config.hidden_size
        qkv = {f"{at}.self_attn.{name}_proj": hidden for name in "qkv"}
        output = load_linear(checkpoint, {f"{at}.self_attn.out_proj": hidden}, hidden, self.bias)
        mlp = load_plain_mlp(checkpoint, (f"{at}.fc1", f"{at}.fc2"), self.config, self.activation, self.bias)
        attention_norm = self._norm(checkpoint, f"{at}.self_attn_layer_norm")
        mlp_norm = self._norm(checkpoint, f"{at}.final_layer_norm")
        return Layer(
            attention_norm=attention_norm if self.norm_first else unchanged,
            qkv=load_linear(checkpoint, qkv, hidden, self.bias),
            head_norm=unchanged,
            tail=Sequential(output, mlp_norm, mlp)
            if self.norm_first
            else PostNorm(output, attention_norm, mlp, mlp_norm),
        )

    def _norm(self, checkpoint: Checkpoint, name: str) -> Transform:
        if not self.norm_parameters:
            return LayerNorm(None, None, _NORM_EPS)
        return load_layer_norm(checkpoint, name, self.config.hidden_size, _NORM_EPS)


def _read_config(fields: Fields) -> ModelConfig:
    num_heads, num_layers = fields.count("num_attention_heads"), fields.count("num_hidden_layers")
    hidden_size = fields.count("hidden_size")
    return ModelConfig(
        model_type="opt",
        vocab_size=fields.count("vocab_size"),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.count("ffn_dim"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=fields.head_dim(hidden_size, num_heads),
        max_position=fields.count("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        windows=(None,) * num_layers,
        eos_token_ids=fields.eos_token_ids(),
        bos_token_id=fields.bos_token_id(),
        is_gated=False,
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product, computed in fp32 and rounded once."""
    return (a.float() @ b.float()).to(a.dtype)

"""Names of tensors that scale no weight."""

import pytest

from baton.modeling.quantized.leftovers import unused_kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.self_attn.k_scale", "KV-cache scales"),
        ("model.layers.0.self_attn.attn.v_scale", "KV-cache scales"),
        ("model.layers.0.self_attn.k_proj.k_scale", "KV-cache scales"),
        ("model.layers.0.self_attn.kv_scale", "KV-cache scales"),
        ("model.layers.0.self_attn.v_proj.output_scale", "KV-cache scales"),
        ("model.layers.0.mlp.up_proj.input_scale", "activation scales"),
        ("model.layers.0.mlp.up_proj.activation_scale", "activation scales"),
        ("model.layers.0.self_attn.o_proj.output_scale", "activation scales"),
        ("model.layers.0.mlp.up_proj.weight_scale", None),
        ("model.layers.0.mlp.up_proj.weight_global_scale", None),
        ("model.layers.0.mlp.up_proj.weight_zero_point", None),
        ("model.norm.weight", None),
    ],
)
def test_kind(name: str, kind: str | None) -> None:
    assert unused_kind(name) == kind

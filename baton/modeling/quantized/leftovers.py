"""Tensors of quantised checkpoints that are not needed to dequantise weights: scales of activations and of a quantised
KV cache.

The formats recognise these tensors by the endings of their names when a model is loaded, and do not read them.
"""

_KINDS = {
    "KV-cache scales": (
        ".k_scale",
        ".v_scale",
        ".q_scale",
        ".kv_scale",
        ".prob_scale",
        ".k_zero_point",
        ".v_zero_point",
        ".q_zero_point",
        ".k_proj.output_scale",
        ".v_proj.output_scale",
        ".k_proj.output_zero_point",
        ".v_proj.output_zero_point",
    ),
    "activation scales": (
        ".input_scale",
        ".input_zero_point",
        ".output_scale",
        ".output_zero_point",
        ".activation_scale",
        ".act_scale",
    ),
}

ACTIVATIONS = "quantisation of activations"
KV_CACHE = "quantisation of the KV cache"


def unused_kind(name: str) -> str | None:
    """Return the kind of the tensor `name`, as text for messages, if it is a scale of activations or of a KV cache.
    Such tensors are not read. Return None for any other tensor."""
    return next((kind for kind, endings in _KINDS.items() if name.endswith(endings)), None)

"""Tensors of quantised checkpoints that no weight needs: scales of activations and of a quantised KV cache.

Formats recognise them by the endings of their names when a model is loaded. They are not read.
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
    """Return the kind of scale that the tensor `name` holds, as readable text, if it does not scale a weight. None for
    any other tensor."""
    return next((kind for kind, endings in _KINDS.items() if name.endswith(endings)), None)

"""A model's shape for cost models is read off its configuration, whatever its family."""

from baton.modeling.checkpoints.registry import from_hf
from baton.modeling.forward.weight_sizes import bytes_per_step
from generate_workers.engine.model_shape import model_shape
from tests.support.models.tiny_models import random_decoder

FALCON = {
    "model_type": "falcon",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "eos_token_id": 2,
}


def test_its_weights_are_those_that_a_step_reads() -> None:
    """All but the norms' gains."""
    decoder = random_decoder(num_layers=3, num_heads=4, num_kv_heads=2)
    shape = model_shape(decoder.config, decoder.dtype.itemsize)
    gains = (2 * decoder.config.num_layers + 1) * decoder.config.hidden_size
    assert bytes_per_step(decoder.weights) == (shape.step_weights + gains) * 4


def test_a_model_without_a_gate_has_a_matrix_less() -> None:
    shape = model_shape(from_hf(FALCON), 2)
    assert not shape.gated and shape.num_kv_heads == 1
    assert shape.layer_weights == 64 * (64 + 2 * 16) + 64 * 64 + 2 * 64 * 256

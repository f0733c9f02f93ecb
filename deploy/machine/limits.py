"""The limit on a request's tokens that follows from model and configuration."""

from pathlib import Path


def tokens_of_slot(folder: Path, max_slot_tokens: int) -> int:
    """Return the tokens, prompt and output, that a request may have: as many as a slot holds and the model has
    positions. Raises ModelError."""
    from modeling.checkpoints.weights import load_config  # imports torch

    return min(max_slot_tokens, load_config(folder).max_position)

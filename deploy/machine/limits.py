"""The limit on a request's tokens that follows from model and configuration."""

from pathlib import Path

from deploy.machine.kept_config import model_config


def tokens_of_slot(folder: Path, max_slot_tokens: int) -> int:
    """Return the number of tokens, prompt and output, that a request may have: limited by a slot's size and the model's
    positions. Raises ModelError."""
    return min(max_slot_tokens, model_config(folder).max_position)

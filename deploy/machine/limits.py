"""What a request may ask of the cluster, by model and configuration."""

from pathlib import Path


def tokens_of_slot(folder: Path, max_slot_tokens: int) -> int:
    """Tokens, prompt and output, that a request may have: as many as a slot holds, and as the model knows positions.
    Raises ModelError."""
    from modeling.checkpoints.weights import load_config  # takes torch along

    return min(max_slot_tokens, load_config(folder).max_position)

"""Writes a checkpoint with the shape of Mistral 7B and random weights in bf16, for load tests of a server.

`python -m benchmarks.device.checkpoint FOLDER` draws the weights on the GPU if one exists, and needs 15 GB of disk. The
tokenizer has one token per letter (tests.support.models.tiny_tokenizer). The model's output is meaningless.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.device.model import SEVEN_B, TINY, Shape
from tests.support.models.letter_models import LetterShape, write_letter_model

_MAX_TOKENS = 8192


def letter_shape(shape: Shape) -> LetterShape:
    """Convert a model shape to the type that the tests' checkpoint writers accept."""
    return LetterShape(
        shape.num_layers,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_heads,
        shape.num_kv_heads,
        _MAX_TOKENS,
        shape.vocab_size,
    )


def main() -> None:
    """Write the checkpoint that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to create for the checkpoint")
    parser.add_argument("--quick", action="store_true", help="a tiny shape: a smoke test")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    shape = letter_shape(TINY if arguments.quick else SEVEN_B)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_letter_model(arguments.folder, shape=shape, dtype="bfloat16", device=device)


if __name__ == "__main__":
    main()

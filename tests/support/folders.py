"""Where the project and the tests' data lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The project."""
DATA = ROOT / "tests" / "data"

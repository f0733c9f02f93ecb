"""Folders of the project and of the tests' data."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Root folder of the project."""
DATA = ROOT / "tests" / "data"

"""The secret and the place of workers that a test makes in its own process."""

from pathlib import Path

from baton.settings.place import WorkerPlace
from baton.transport.identity import ClusterSecret

SECRET = ClusterSecret("5ec" + "0" * 61)
PLACE = WorkerPlace(model_folder=Path("model"), secret=SECRET.text)
"""A place on this machine, whose model is already loaded."""

"""Cluster secret and WorkerPlace of workers that a test runs in its own process."""

from pathlib import Path

from baton.settings.place import WorkerPlace
from baton.transport.identity import ClusterSecret

SECRET = ClusterSecret("5ec" + "0" * 61)
PLACE = WorkerPlace(model_folder=Path("model"), secret=SECRET.text)
"""WorkerPlace on this machine, for workers whose model is already loaded."""

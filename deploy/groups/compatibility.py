"""Checks at the start of a worker that it is compatible with the other workers of its cluster.

Performs no I/O. Owned by the cluster's supervisor.
"""

from dataclasses import dataclass, field
from pathlib import Path

from baton import __version__
from baton.errors import VersionMismatchError
from baton.modeling.kernels.native import choice_path
from baton.transport.proto_types import kernels_from_proto
from baton.types import KernelChoice
from deploy.config.worker import WorkerConfig
from deploy.groups.worker import WorkerStatus


@dataclass
class CompatibilityCheck:
    """Properties that the workers of a cluster must share. All workers must have the supervisor's version. Workers with
    the same model folder must have the same KV layout. Workers on the same kind of processor must use the same kernels.
    The first checked worker with a model folder determines the KV layout for this folder. The first checked worker on a
    kind of processor determines the kernels for this kind."""

    layouts: dict[Path, tuple[str, str]] = field(default_factory=dict)
    """KV layout for each model folder, as (fingerprint of the layout, name of the first worker that reported it)."""
    kernels: dict[str, tuple[KernelChoice, str]] = field(default_factory=dict)
    """Kernels for each kind of processor, as (the kernels, name of the first worker that reported them)."""

    def check(self, config: WorkerConfig, status: WorkerStatus) -> None:
        """Check a worker against the workers that were checked before. Raises VersionMismatchError if its version, KV
        layout or kernels differ."""
        if status.version != __version__:
            raise VersionMismatchError(
                f"{config.name} has Baton {status.version}, its supervisor {__version__}: run one version everywhere"
            )
        layout, told_by = self.layouts.setdefault(config.place.model_folder, (status.layout_fingerprint, config.name))
        if status.layout_fingerprint != layout:
            raise VersionMismatchError(
                f"workers differ in KV layout: {told_by} has {layout}; {config.name} has {status.layout_fingerprint}: "
                "run one model everywhere"
            )
        self._check_kernels(config, kernels_from_proto(status.kernels))

    def _check_kernels(self, config: WorkerConfig, choice: KernelChoice) -> None:
        agreed, told_by = self.kernels.setdefault(choice.processor, (choice, config.name))
        if choice != agreed:
            raise VersionMismatchError(
                f"workers on {choice.processor} differ in kernels: {told_by} has {agreed}; {config.name} has {choice}: "
                "install the same build of Baton on all nodes, and copy one node's choice-*.json to the others' "
                f"{choice_path().parent}"
            )

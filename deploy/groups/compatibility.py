"""Checks when a worker starts that it matches the other workers of its cluster.

Pure. Owned by the cluster's supervisor.
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
    """Properties that workers of a cluster must share. All workers have the supervisor's version. Workers with the same
    model folder have the same KV layout, and workers on the same kind of processor have the same kernels. The first
    worker that is checked determines the layout and the kernels."""

    layouts: dict[Path, tuple[str, str]] = field(default_factory=dict)
    """KV layout by model folder: its fingerprint, and the worker that reported it."""
    kernels: dict[str, tuple[KernelChoice, str]] = field(default_factory=dict)
    """Kernels by kind of processor, with the worker that reported them."""

    def check(self, config: WorkerConfig, status: WorkerStatus) -> None:
        """Raise VersionMismatchError if the worker differs from the workers that were checked before."""
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

"""Selects the methods with which the C++ kernels of this process multiply bf16 numbers
(`baton.modeling.kernels.products`).

All methods give the same products, but sum them in different orders. All processes of a cluster that run on the same
type of processor should therefore use the same choice. A worker receives the cluster's choice and passes it to
`ProcessKernels.use`. Otherwise the choice stored for this processor is used. If none is stored, it is measured
(`baton.modeling.kernels.kept_choice`).
"""

import threading
from collections.abc import Iterable

from baton.modeling.kernels import native
from baton.modeling.kernels.kept_choice import load_or_measure
from baton.modeling.kernels.processor import processor_kind
from baton.types import KernelChoice


class ProcessKernels:
    """Holder of the choice of kernels in one process. The choice is made when it is first requested. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._choice: KernelChoice | None = None

    @property
    def choice(self) -> KernelChoice:
        """Return the choice of kernels in this process. Blocks for some seconds if the kernels have to be measured."""
        return self._choice or self.use(())

    def use(self, choices: Iterable[KernelChoice]) -> KernelChoice:
        """Select the entry of `choices` for this type of processor, and return it. If there is none, select the choice
        that is stored or measured on this machine.

        Call it before the model is loaded, because loading binds linear layers to their kernels. `choices` is ignored
        if no kernels can be loaded. The handshake with the cluster then reports that this process's choice differs from
        the cluster's.
        """
        kind = processor_kind()
        given = next((each for each in choices if each.processor == kind), None)
        with self._lock:
            if given is not None and native.load():
                self._choice = given
            self._choice = self._choice or load_or_measure()
            return self._choice


KERNELS = ProcessKernels()
"""Choice of kernels in this process."""

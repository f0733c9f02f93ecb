"""Choice of the methods by which this process's C++ kernels multiply bf16 numbers (`baton.modeling.kernels.products`).

All methods give the same products, but sum them in different orders. So all processes of a cluster that run on one kind
of processor use the same choice. A worker gets the cluster's choice by `ProcessKernels.use`. Otherwise the choice that
is kept for this processor is used, which is measured if none is kept (`baton.modeling.kernels.kept_choice`).
"""

import threading
from collections.abc import Iterable

from baton.modeling.kernels import native
from baton.modeling.kernels.kept_choice import load_or_measure
from baton.modeling.kernels.processor import processor_kind
from baton.types import KernelChoice


class ProcessKernels:
    """Choice of kernels in one process, made at its first use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._choice: KernelChoice | None = None

    @property
    def choice(self) -> KernelChoice:
        """Return the kernels of this process. Blocks for some seconds if they have to be measured."""
        return self._choice or self.use(())

    def use(self, choices: Iterable[KernelChoice]) -> KernelChoice:
        """Use the entry of `choices` that was made for this kind of processor, and return it. If there is none, use the
        choice that is stored or measured on this machine.

        Call before the model is loaded, which binds linear layers to their kernels. `choices` are ignored if no kernels
        can be loaded; the handshake then shows the difference.
        """
        kind = processor_kind()
        given = next((each for each in choices if each.processor == kind), None)
        with self._lock:
            if given is not None and native.load():
                self._choice = given
            self._choice = self._choice or load_or_measure()
            return self._choice


KERNELS = ProcessKernels()
"""Choice of kernels of this process."""

"""How the kernels in C++ multiply bf16 numbers in this process: by one of the ways in `modeling.kernels.products`.

All ways give the same products, summed in another order, so the processes of a cluster that run on one kind of
processor use one choice. A worker gets the cluster's by `ProcessKernels.use`. Without one, the choice that is kept for
this processor holds; it is measured first if there is none (`modeling.kernels.kept_choice`).
"""

import threading
from collections.abc import Iterable

from baton.types import KernelChoice
from modeling.kernels import native
from modeling.kernels.kept_choice import load_or_measure
from modeling.kernels.processor import processor_kind


class ProcessKernels:
    """The choice of kernels in one process: fixed when it is first asked for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._choice: KernelChoice | None = None

    @property
    def choice(self) -> KernelChoice:
        """Return the kernels of this process. Blocks for some seconds where they have to be measured."""
        return self._choice or self.use(())

    def use(self, choices: Iterable[KernelChoice]) -> KernelChoice:
        """Take the one of `choices` that was made for this kind of processor, else the one that is kept or measured
        here, and return it. Called before the model is loaded, which binds linear layers to their kernels. Without
        kernels that can run, `choices` are ignored: the handshake shows the difference."""
        kind = processor_kind()
        given = next((each for each in choices if each.processor == kind), None)
        with self._lock:
            if given is not None and native.load():
                self._choice = given
            self._choice = self._choice or load_or_measure()
            return self._choice


KERNELS = ProcessKernels()
"""The choice of kernels of this process."""

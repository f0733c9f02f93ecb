"""`python -m modeling.kernels`: measure which of the kernels that are built are the fastest on this machine.

A model's first use then does not wait for it. The exit status is 1 when there are no kernels; the log says why.
"""

import sys

from modeling.kernels import native
from modeling.kernels.process_kernels import KERNELS

print(f"instruction set: {native.chosen_set() or 'none is built for this processor'}")
print(f"{KERNELS.choice.processor}: {KERNELS.choice}")
sys.exit(not native.load())

"""`python -m baton.modeling.kernels`: measure which of the built kernels are the fastest on this machine.

The first use of a model then does not wait for the measurement. The exit status is 1 when no kernels can be loaded. The
log gives the reason.
"""

import sys

from baton.modeling.kernels import native
from baton.modeling.kernels.process_kernels import KERNELS

print(f"instruction set: {native.chosen_set() or 'none is built for this processor'}")
print(f"{KERNELS.choice.processor}: {KERNELS.choice}")
sys.exit(not native.load())

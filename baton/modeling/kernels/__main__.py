"""Command `python -m baton.modeling.kernels`: measures which of the built kernels are the fastest on this machine.

After the command, the first use of a model does not have to wait for the measurement. The exit status is 1 if no
kernels can be loaded. The log gives the reason.
"""

import sys

from baton.modeling.kernels import native
from baton.modeling.kernels.process_kernels import KERNELS

print(f"instruction set: {native.chosen_set() or 'none is built for this processor'}")
print(f"{KERNELS.choice.processor}: {KERNELS.choice}")
sys.exit(not native.load())

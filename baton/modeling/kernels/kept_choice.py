"""Stores the choice of kernels in the user's cache folder, so that all processes on this machine use the same choice.

`process_kernels` requests the choice. If none is stored for this processor, torch version and kernel build, `choosing`
measures one. Reading a stored choice does not need torch.
"""

import dataclasses
import fcntl
import json
import logging

from baton.modeling.kernels import native
from baton.modeling.kernels.processor import processor_kind
from baton.process.whole_files import whole
from baton.types import KernelChoice

logger = logging.getLogger(__name__)


def load_choice() -> KernelChoice | None:
    """Return the choice of kernels that is stored for this processor. None: no choice is stored, or it cannot be
    read."""
    path = native.choice_path()
    try:
        choice = KernelChoice(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s: cannot be read (%s): kernels are measured again", path, error)
        return None
    return choice if choice.processor == processor_kind() else None


def load_or_measure() -> KernelChoice:
    """Return the choice of kernels that is stored for this processor. If none is stored, measure a choice and store it,
    which blocks for some seconds. If several processes call this function at the same time, one measures and the others
    wait."""
    from baton.modeling.kernels.choosing import measure_choice  # imports torch

    path = native.choice_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        logger.warning("the choice of kernels cannot be kept (%s): every process measures it again", error)
        return measure_choice()
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
        choice = load_choice()
        if choice is None:
            choice = measure_choice()
            if native.load():  # without kernels nothing was measured
                with whole(path) as partial:
                    partial.write_text(json.dumps(dataclasses.asdict(choice)) + "\n")
        return choice

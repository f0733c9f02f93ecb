"""Recognizes errors after which a process cannot use its device any more."""

import torch

_PREFIXES = ("CUDA error", "Triton Error", "CUDNN_", "CUBLAS_")


def device_failure(error: BaseException) -> str:
    """Return one line of text that describes the failure of a device that caused `error`: an error or a lack of memory
    in a kernel or a copy. Return an empty string if the device did not fail. After an error of a kernel, a CUDA context
    refuses all further work, and after a lack of memory, the process may lack it again."""
    cause: BaseException | None = error
    while cause is not None:
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        is_known = isinstance(cause, torch.AcceleratorError | torch.OutOfMemoryError)
        if is_known or type(cause).__module__.startswith("triton.") or lines[0].startswith(_PREFIXES):
            return f"{type(cause).__name__}: {lines[0]}"
        cause = cause.__cause__
    return ""

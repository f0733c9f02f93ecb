"""How one kind of processor computes with bfloat16: what the processes of a cluster agree on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelChoice:
    """Which kernels compute with bfloat16 on one kind of processor; `modeling.kernels.choosing` measures it."""

    processor: str
    """The kind: the processor's name and a hash of what tells it from others of that name."""
    attention: str
    """How attention multiplies: a name of `modeling.kernels.products`."""
    panels: str
    """How linear layers in C++ multiply: likewise a name of `modeling.kernels.products`, never DOT."""
    torch_rows: int | None
    """From how many rows on a linear layer is computed by torch: 1 for always, None for never."""

    def __str__(self) -> str:
        if self.torch_rows == 1:
            linear = "linear layers by torch"
        elif self.torch_rows is None:
            linear = f"linear layers {self.panels}"
        else:
            linear = f"linear layers {self.panels}, from {self.torch_rows} rows on by torch"
        return f"attention {self.attention}, {linear}"

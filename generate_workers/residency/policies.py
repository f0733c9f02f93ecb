"""All residency policies, by the name that a configuration gives them."""

from collections.abc import Callable, Mapping

import torch

from baton.errors import ConfigError
from baton.types import KvLayout
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.host import HostResidency
from generate_workers.residency.host_link import HostLink
from generate_workers.residency.port import KvShape, Residency
from modeling.kv_buffers import OUT_OF_MEMORY
from modeling.kv_memory import PagedMemory, RowMemory, TensorMemory


def _device(shape: KvShape, device: torch.device) -> Residency:
    return DeviceResidency(shape, lambda layout, most: _on_device(layout, most, device))


def _host(shape: KvShape, device: torch.device) -> Residency:
    def make_home(layout: KvLayout, max_tokens: int) -> RowMemory:
        if device.type == "cpu":
            return PagedMemory(layout, max_tokens)
        return TensorMemory(layout, max_tokens, torch.device("cpu"), pinned=True)

    return HostResidency(shape, make_home, lambda layout, most: _on_device(layout, most, device), HostLink())


def _on_device(layout: KvLayout, max_tokens: int, device: torch.device) -> RowMemory:
    if device.type == "cpu":
        return PagedMemory(layout, max_tokens)
    return TensorMemory(layout, max_tokens, device)


POLICIES: Mapping[str, Callable[[KvShape, torch.device], Residency]] = {"device": _device, "host": _host}
"""How each policy is made, for a decoder on a device."""


def make_residency(name: str, shape: KvShape, device: torch.device) -> Residency:
    """The policy of that name, for all slots. Raises ConfigError when there is none, and when the slots' address space
    cannot be had."""
    if name not in POLICIES:
        raise ConfigError(f"residency = {name!r} is unknown: use one of {', '.join(POLICIES)}")
    try:
        return POLICIES[name](shape, device)
    except (*OUT_OF_MEMORY, OSError) as error:
        tokens = f"{shape.num_slots} slots of {shape.max_slot_tokens} tokens"
        raise ConfigError(f"address space for {tokens} cannot be had ({error}): use fewer or smaller slots") from error

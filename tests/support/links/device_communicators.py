"""Communicators of devices that stand for GPUs: of two ranks, as NCCL's, by gloo over their memory."""

import torch.distributed as dist

from prefill_workers.communicators import Communicator, GroupCommunicator, gloo_group

HOST = "127.0.0.1"


class GlooBackend:
    """Makes communicators of gloo. Implements CommunicatorBackend."""

    def __init__(self, device_id: str, kind: str = "gloo") -> None:
        self.device_id = device_id
        self.kind = kind

    def connect(self, store: dist.Store, place: int, timeout_s: float) -> Communicator:
        return GroupCommunicator(gloo_group(store, place, 2, HOST, timeout_s), 1 - place)

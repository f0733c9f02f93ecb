"""Communicators between two devices that replace GPUs. Like NCCL's communicators, each connects two ranks; gloo
transfers the data between their memories."""

import torch.distributed as dist

from prefill_workers.communicators import Communicator, GroupCommunicator, gloo_group

HOST = "127.0.0.1"


class GlooBackend:
    """Backend that creates gloo communicators. Implements CommunicatorBackend."""

    def __init__(self, device_id: str, kind: str = "gloo") -> None:
        self.device_id = device_id
        self.kind = kind

    def connect(self, store: dist.Store, place: int, timeout_s: float) -> Communicator:
        return GroupCommunicator(gloo_group(store, place, 2, HOST, timeout_s), 1 - place)

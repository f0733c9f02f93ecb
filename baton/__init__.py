"""Baton's public names: what a user imports, and the vocabulary that all parts share (layer 0: stdlib, grpc, protobuf).

The names below are loaded at their first use, so that parts that must not import grpc can import this package.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client
    from baton.cluster_state import ClusterState, GenerationStatus, GroupState, PrefillStatus
    from baton.errors import BatonError
    from baton.results import (
        Choice,
        Completion,
        ModelInfo,
        Placement,
        PlacementTerms,
        PrefillTrace,
        RankTiming,
        Timings,
        Usage,
        WidthChoice,
        WidthOption,
    )
    from baton.resume import Reconnect
    from baton.sampling_params import SamplingParams
    from baton.streams import AsyncStream, Stream
    from baton.types import FinishReason, SampledToken, TokenEvent, TokenLogprob, TokenRange

__version__ = "0.2.0.dev0"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BatonError",
    "Choice",
    "Client",
    "ClusterState",
    "Completion",
    "FinishReason",
    "GenerationStatus",
    "GroupState",
    "ModelInfo",
    "Placement",
    "PlacementTerms",
    "PrefillStatus",
    "PrefillTrace",
    "RankTiming",
    "Reconnect",
    "SampledToken",
    "SamplingParams",
    "Stream",
    "Timings",
    "TokenEvent",
    "TokenLogprob",
    "TokenRange",
    "Usage",
    "WidthChoice",
    "WidthOption",
    "__version__",
]

_HOME_OF = MappingProxyType(
    {
        "AsyncClient": "baton.client",
        "AsyncStream": "baton.streams",
        "BatonError": "baton.errors",
        "Choice": "baton.results",
        "Client": "baton.client",
        "ClusterState": "baton.cluster_state",
        "Completion": "baton.results",
        "FinishReason": "baton.types",
        "GenerationStatus": "baton.cluster_state",
        "GroupState": "baton.cluster_state",
        "ModelInfo": "baton.results",
        "Placement": "baton.results",
        "PlacementTerms": "baton.results",
        "PrefillStatus": "baton.cluster_state",
        "PrefillTrace": "baton.results",
        "RankTiming": "baton.results",
        "Reconnect": "baton.resume",
        "SampledToken": "baton.types",
        "SamplingParams": "baton.sampling_params",
        "Stream": "baton.streams",
        "Timings": "baton.results",
        "TokenEvent": "baton.types",
        "TokenLogprob": "baton.types",
        "TokenRange": "baton.types",
        "Usage": "baton.results",
        "WidthChoice": "baton.results",
        "WidthOption": "baton.results",
    }
)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

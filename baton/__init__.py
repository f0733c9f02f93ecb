"""Public API of Baton.

Names are imported lazily, at their first use. Modules that must not import grpc can therefore import this package. A
client needs only grpc and protobuf.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.calls.cluster_state import (
        ClusterState,
        GenerationStatus,
        GroupState,
        PrefillStatus,
        Scaling,
        ScalingChange,
    )
    from baton.calls.resume import Reconnect
    from baton.calls.streams import AsyncStream, Stream
    from baton.client import AsyncClient, Client
    from baton.errors import BatonError
    from baton.results.completion import Choice, Completion, ModelInfo, Usage
    from baton.results.prefill_trace import (
        Placement,
        PlacementTerms,
        PrefillTrace,
        PrefixFetch,
        RankTiming,
        WidthChoice,
        WidthOption,
    )
    from baton.results.request_list import RequestList, RequestStatus
    from baton.results.timings import DraftCounts, SpeculationTrace, Timings
    from baton.sampling_params import SamplingParams, StructuredOutput
    from baton.types import DraftRound, FinishReason, SampledToken, TokenEvent, TokenLogprob, TokenOrigin, TokenRange

__version__ = "0.2.0.dev0"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BatonError",
    "Choice",
    "Client",
    "ClusterState",
    "Completion",
    "DraftCounts",
    "DraftRound",
    "FinishReason",
    "GenerationStatus",
    "GroupState",
    "ModelInfo",
    "Placement",
    "PlacementTerms",
    "PrefillStatus",
    "PrefillTrace",
    "PrefixFetch",
    "RankTiming",
    "Reconnect",
    "RequestList",
    "RequestStatus",
    "SampledToken",
    "SamplingParams",
    "Scaling",
    "ScalingChange",
    "SpeculationTrace",
    "Stream",
    "StructuredOutput",
    "Timings",
    "TokenEvent",
    "TokenLogprob",
    "TokenOrigin",
    "TokenRange",
    "Usage",
    "WidthChoice",
    "WidthOption",
    "__version__",
]

_NAMES_IN = {
    "baton.client": "AsyncClient Client",
    "baton.calls.cluster_state": "ClusterState GenerationStatus GroupState PrefillStatus Scaling ScalingChange",
    "baton.errors": "BatonError",
    "baton.results.request_list": "RequestList RequestStatus",
    "baton.results.completion": "Choice Completion ModelInfo Usage",
    "baton.results.prefill_trace": "Placement PlacementTerms PrefillTrace PrefixFetch RankTiming WidthChoice"
    " WidthOption",
    "baton.results.timings": "DraftCounts SpeculationTrace Timings",
    "baton.calls.resume": "Reconnect",
    "baton.sampling_params": "SamplingParams StructuredOutput",
    "baton.calls.streams": "AsyncStream Stream",
    "baton.types": "DraftRound FinishReason SampledToken TokenEvent TokenLogprob TokenOrigin TokenRange",
}
_HOME_OF = MappingProxyType({name: home for home, names in _NAMES_IN.items() for name in names.split()})


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

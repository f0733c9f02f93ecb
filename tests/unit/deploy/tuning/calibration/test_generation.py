"""Of which drafts rounds are measured beside generation steps."""

import pytest

from baton.calls.cluster_state import ClusterState, GenerationStatus, GroupState
from baton.v1.generate_pb2 import DraftCounts, DraftSource, SpeculationStatus
from deploy.tuning.calibration.generation import draft_keys_of


@pytest.mark.parametrize(
    ("said", "measured"),
    [
        ({}, {}),
        ({"ngram": 0, "streaming": 256}, {"ngram": 0, "streaming": 256}),
        ({"model": 256}, {}),
    ],
)
def test_steps_of_a_draft_model_are_not_measured_as_steps_of_the_model(
    said: dict[str, int], measured: dict[str, int]
) -> None:
    sources = [DraftSource(counts=DraftCounts(source=name), draft_keys=num) for name, num in said.items()]
    status = GenerationStatus(speculation=SpeculationStatus(sources=sources))
    generate = GroupState("generate-0", "generate", (), 0, True, 0, 0, generation=status)
    silent = GroupState("generate-1", "generate", (), 0, False, 0, 0)
    assert draft_keys_of(ClusterState((generate, silent), 0, 0, 0, "v")) == measured

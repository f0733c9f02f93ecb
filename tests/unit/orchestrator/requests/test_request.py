"""What a request needs, by hand; and each of its choices as a request of its own."""

from baton.sampling_params import SamplingParams
from baton.types import RequestId
from orchestrator.requests.request import Request

PARAMS = SamplingParams(max_tokens=9, n=2, seed=7)
NEW = Request(RequestId("r"), (1, 2, 3), PARAMS)
RESUMED = Request(RequestId("r"), (1, 2, 3), PARAMS, outputs=((40,), (50, 51)))


def test_each_choice_needs_a_slot_for_the_prompt_and_its_own_output() -> None:
    assert (NEW.num_slots, NEW.num_tokens, NEW.capacity_tokens) == (2, 3, 12)
    assert not NEW.is_resumed


def test_tokens_that_the_client_has_are_computed_again_where_all_choices_share_them() -> None:
    assert (RESUMED.is_resumed, RESUMED.num_given, RESUMED.num_tokens) == (True, 3, 3)
    assert Request(RequestId("r"), (1, 2, 3), PARAMS.of_choice(0), outputs=((40, 41),)).num_tokens == 5


def test_a_choice_alone_is_a_request_for_one_with_its_own_seed_and_tokens() -> None:
    alone = RESUMED.of_choice(1, PARAMS.of_choice(1))
    assert (alone.request_id, alone.params.seed, alone.outputs, alone.num_slots) == ("r/1", 8, ((50, 51),), 1)
    assert NEW.of_choice(1, PARAMS.of_choice(1)).outputs == ()

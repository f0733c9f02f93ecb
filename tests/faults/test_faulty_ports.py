"""A call slow, refused, lost, dropped or heard twice: tokens stay exact, nothing is held. Many at once: test_chaos."""

import asyncio

import pytest

from baton.sampling_params import SamplingParams
from deploy.chaos.faults import Fault
from tests.support.clusters.fault_plans import PickedPlan
from tests.support.clusters.supervision import IMPATIENT, TTL_S, SupervisedCluster, supervised
from tests.support.engines.generation import prompt, reference_ids

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, presence_penalty=0.5, ignore_eos=True)
SETTLE_S = 2 * TTL_S + 5
"""A slot whose release was lost is freed by its lease's end."""

CASES: dict[str, tuple[Fault, ...]] = {
    "Reserve": tuple(Fault),
    "Push": tuple(Fault),
    "PushShared": (Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP),
    "Commit": tuple(Fault),
    "Run": (Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP),
    "Streams": (Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP),
    "Abort": tuple(Fault),
    "Cancel": tuple(Fault),
    "Renew": tuple(Fault),
    "StartEpoch": (Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP),
    "link": (Fault.SLOW, Fault.REFUSE, Fault.DROP),
    "outlet": (Fault.SLOW, Fault.REFUSE, Fault.TWICE),
}
OCCASIONS: dict[str, dict[str, Fault]] = {
    "Abort": {"Run": Fault.REFUSE},
    "Cancel": {"Streams": Fault.LOSE},
    "Renew": {"Run": Fault.DROP},
    "StartEpoch": {"link": Fault.REFUSE},
}
"""What has to go wrong for a call to be made at all."""
NUM_TRIES = 3
"""On a crowded machine a lease may run out, which costs one attempt more."""
LONG = ("Renew", "StartEpoch")
"""Calls whose faults take seconds to be noticed."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.ci) if name in LONG else name for name in CASES])
async def test_one_fault_costs_an_attempt_at_most(name: str) -> None:
    for fault in CASES[name]:
        tried = [await num_extra_attempts(name, fault)]
        while tried[-1] > 0 and len(tried) < NUM_TRIES:
            tried.append(await num_extra_attempts(name, fault))
        assert tried[-1] <= 0, f"{fault}: {tried}"


async def num_extra_attempts(name: str, fault: Fault) -> int:
    """How many attempts a request takes beyond the first and one for each fault that may cost one. It is answered."""
    plan = PickedPlan({name: fault, **OCCASIONS.get(name, {})}, amount=0.4)
    one_engine = SupervisedCluster(
        names=("prefill-0", "generate-0"), heartbeat=IMPATIENT, faults=plan, may_share=name != "Push"
    )
    async with supervised(one_engine) as made:
        plan.is_on = True
        answer = await asyncio.wait_for(made.ask(made.request(prompt(40), PARAMS)), 20)
        assert answer.token_ids == reference_ids(made.decoder, prompt(40), PARAMS), fault
        assert answer.indices == list(range(PARAMS.max_tokens))
        await made.until_empty(SETTLE_S)
        assert plan.struck[name, fault] == 1
        assert answer.finished is not None
        num_harmless = plan.struck[name, Fault.SLOW] + plan.struck[name, Fault.TWICE]
        return answer.finished.usage.num_attempts - (1 + plan.struck.total() - num_harmless)

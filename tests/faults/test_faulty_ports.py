"""Single faults: a call is slow, refused, lost, dropped or delivered twice. Tokens stay exact, and no resource is held
afterwards. test_chaos tests many faults at once."""

from dataclasses import replace

import pytest

from baton.sampling_params import SamplingParams
from baton_lab.chaos import network
from baton_lab.chaos.faults import Fault
from deploy.groups.surroundings import Heartbeat
from tests.support.clusters import supervision
from tests.support.clusters.fault_plans import PickedPlan
from tests.support.clusters.supervision import SupervisedCluster, supervised
from tests.support.engines.generation import prompt, reference_ids
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, presence_penalty=0.5, ignore_eos=True)
CONFIG = replace(supervision.CONFIG, lease_ttl_s=6.0)
"""A slot whose release was lost is freed when its lease ends. A crowded machine renews a lease in time."""

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
    "sender": (Fault.SLOW, Fault.REFUSE, Fault.TWICE),
}
OCCASIONS: dict[str, dict[str, Fault]] = {
    "Abort": {"Run": Fault.REFUSE},
    "Cancel": {"Streams": Fault.LOSE},
    "Renew": {"Run": Fault.DROP},
    "StartEpoch": {"link": Fault.REFUSE},
}
"""What has to go wrong for a call to be made at all."""
HEARTBEAT = Heartbeat(interval_s=0.2, dead_after_s=20.0)
LONG = ("Renew", "StartEpoch")
"""Calls whose faults take seconds to be noticed."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.ci) if name in LONG else name for name in CASES])
async def test_one_fault_costs_an_attempt_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "Renew":  # which comes before the connection is found dead
        monkeypatch.setattr(network, "DEAD_S", CONFIG.lease_ttl_s / 3 + 0.5)
    for fault in CASES[name]:
        await check_fault(name, fault)


async def check_fault(name: str, fault: Fault) -> None:
    """A request is answered in at most one attempt more than there are faults that may cost one."""
    plan = PickedPlan({name: fault, **OCCASIONS.get(name, {})}, amount=0.4)
    one_engine = SupervisedCluster(
        names=("prefill-0", "generate-0"),
        num_ranks=1 if name == "Renew" else 2,  # a second rank would not wait for so long
        heartbeat=HEARTBEAT,
        faults=plan,
        may_share=name != "Push",
    )
    async with supervised(one_engine, config=CONFIG) as made:
        plan.is_on = True
        answer = await made.ask(made.request(prompt(40), PARAMS))
        assert answer.token_ids == reference_ids(made.decoder, prompt(40), PARAMS), fault
        assert answer.indices == list(range(PARAMS.max_tokens))
        await made.until_empty()

        async def num_struck() -> int:
            return plan.struck[name, fault]

        await eventually(num_struck, lambda num: num == 1)  # calls that free slots are made in the background
        num_harmless = plan.struck[name, Fault.SLOW] + plan.struck[name, Fault.TWICE]
        assert answer.end.usage.num_attempts <= 1 + plan.struck.total() - num_harmless, fault

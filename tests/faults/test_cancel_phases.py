"""A client cancels its request in each phase. Both sides are free soon after the current step or layer."""

import pytest

from tests.support.clusters.clients import Answer, StreamCall
from tests.support.clusters.phases import IDS, OTHER, OTHER_IDS, PHASES, Phase, Scene, scene
from tests.support.engines.generation import reference_ids
from tests.support.engines.speculating import ways
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

WHERE_ENGINES_STEP = ("inserting", "decoding", "decoding its own prefill", "returning")
"""The phases in which a generation engine has rows."""


@pytest.mark.parametrize("name", PHASES)
async def test_a_cancel_frees_both_sides(name: str) -> None:
    await check_cancel(name, "off")


@pytest.mark.parametrize("way", ways(ci=("auto", "ngram", "streaming", "streaming host")))
@pytest.mark.parametrize("name", WHERE_ENGINES_STEP)
async def test_a_cancel_in_a_round_of_drafts_frees_both_sides_too(name: str, way: str) -> None:
    await check_cancel(name, way)


@pytest.mark.parametrize(
    "num_calls", [pytest.param(number, marks=[pytest.mark.ci] if number != 5 else []) for number in range(14)]
)
async def test_so_does_a_cancel_anywhere_in_a_round(num_calls: int) -> None:
    """A round is three forwards of drafts over two segments of keys, and the one that verifies, over one; each calls
    attention for each segment in two layers."""

    async def drafting(scene: Scene) -> StreamCall:
        call, (gate,) = scene.ask(), scene.made.group_gates
        await Answer().read(call, 3)
        gate.shut(num_calls)
        await gate.until_reached()
        return call

    await check_cancel("drafting", "streaming", drafting)


@pytest.mark.parametrize("way", ways(ci=("off", "streaming host")))
@pytest.mark.parametrize("name", PHASES)
async def test_a_cancel_frees_devices_with_memory_of_their_own(name: str, way: str) -> None:
    await check_cancel(name, way, device="emulated")


async def check_cancel(name: str, way: str, phase: Phase | None = None, *, device: str = "cpu") -> None:
    """Soon after the end of the step or layer under way nothing is held, and others go on."""
    async with scene(way, device) as on:
        call = await (phase or PHASES[name])(on)
        held = await on.held()
        assert name == "queued" or any(held), "the request is nowhere"
        call.cancel()
        await eventually(on.forgotten, bool)
        await on.end_step()
        await on.until_free()
        on.let_go()
        for other in on.others:
            assert (await other).token_ids == reference_ids(on.made.decoder, OTHER_IDS, OTHER)
        on.made.members.update(on.made.view())
        answer = await on.made.ask(on.made.request(IDS, OTHER))
        assert answer.token_ids == reference_ids(on.made.decoder, IDS, OTHER)

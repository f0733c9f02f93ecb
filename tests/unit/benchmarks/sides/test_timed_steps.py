"""Timed steps compute what others do, and their parts are parts of the step."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.copying import LinkRate
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.decoder import Decoder
from baton_lab.comparators.residencies import make_residency
from benchmarks.sides.offloaded import running
from benchmarks.sides.timed_steps import TimedDecoder, TimedDevice, TimedResidency
from benchmarks.sparse import FittedHere, contexts_of
from benchmarks.support.step_parts import Part, PartClock
from deploy.tuning.selection.passages import Context, PassageRows, prefill, shape_for
from tests.support.models.letter_models import write_letter_model

TOKEN_IDS = tuple((3 * at * at + at) % 95 for at in range(300))
RATE = LinkRate(1e9, latency_s=1e-3)
POLICIES = ("device", "host", "infinigen", "window", "h2o")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_letter_model(tmp_path_factory.mktemp("letters")))


@pytest.fixture(scope="module")
def contexts(decoder: Decoder) -> list[Context]:
    return contexts_of(TOKEN_IDS, prefill(decoder, TOKEN_IDS[:230]), [200, 230], num_steps=6)


@contextmanager
def rows_of(policy: str, decoder: Decoder, contexts: list[Context], clock: PartClock | None) -> Iterator[PassageRows]:
    device = EmulatedDevice(RATE) if clock is None else TimedDevice(RATE, clock)
    there = Decoder(decoder.config, decoder.weights, device=device)
    if clock is not None:
        there = TimedDecoder(decoder, device, clock)
    shape = shape_for(there, [context.passage for context in contexts])
    source = replace(FittedHere(decoder, text=TOKEN_IDS), decoder=there)
    with closing(make_residency(policy, shape, device, source)) as residency:
        watched = residency if clock is None else TimedResidency(residency, clock)
        with PassageRows.opened(there, watched, contexts) as rows:
            yield rows
    device.link.rest()


@pytest.mark.parametrize("policy", POLICIES)
def test_timed_steps_have_the_bits_and_bytes_of_others(policy: str, decoder: Decoder, contexts: list[Context]) -> None:
    with rows_of(policy, decoder, contexts, PartClock()) as timed, rows_of(policy, decoder, contexts, None) as plain:
        for _ in range(3):
            ours, theirs = timed.step(), plain.step()
            assert torch.equal(ours.losses_B, theirs.losses_B)
            assert ours.num_link_bytes == theirs.num_link_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_parts_are_of_the_step(policy: str, decoder: Decoder, contexts: list[Context]) -> None:
    source = FittedHere(decoder, text=TOKEN_IDS)
    with running(policy, contexts, source, RATE, None, clock=PartClock()) as side:
        step_ms = side.step_ms()
    assert sum(side.parts_ms.values()) <= step_ms
    assert min(side.parts_ms[part] for part in (Part.ATTENTION, Part.LINEAR, Part.POLICY)) > 0
    assert (side.parts_ms[Part.TRANSFER] > 0) == (policy != "device")


def test_waits_that_the_link_counts_are_in_the_transfers_part(decoder: Decoder, contexts: list[Context]) -> None:
    clock = PartClock()
    with running("host", contexts, FittedHere(decoder, text=TOKEN_IDS), RATE, None, clock=clock) as side:
        before_s, waited_s = clock.spent_s[Part.TRANSFER], side.device.link.waited_s
        side.step_ms()
        assert 0 < side.device.link.waited_s - waited_s <= clock.spent_s[Part.TRANSFER] - before_s


def test_sides_without_a_clock_have_no_parts(decoder: Decoder, contexts: list[Context]) -> None:
    with running("host", contexts, FittedHere(decoder, text=TOKEN_IDS), RATE, None) as side:
        assert side.step_ms() > 0
    assert side.parts_ms == {}

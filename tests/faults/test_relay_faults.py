"""`baton local` loses its generation engine, and the stream continues. test_rank_faults tests the loss of ranks."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from tests.support.clusters.relays import ask, check_drafted, local_relay
from tests.support.engines.speculating import SPECULATING, ways
from tests.support.models.texts import passage_ids

pytestmark = pytest.mark.integration

LONG = SamplingParams(max_tokens=120, temperature=0.8, seed=5, ignore_eos=True)


@pytest.mark.parametrize("way", ways("off", ci=("snapkv", "streaming host")))
async def test_a_stream_goes_on_when_its_generation_engine_dies(short_smollm2: Path, way: str) -> None:
    async with local_relay(short_smollm2, num_ranks=1, heartbeat_s=0.5, generate=SPECULATING[way]) as relay:
        prompt = passage_ids(short_smollm2, 50)
        expected = await ask(relay, prompt, LONG)
        victim = relay.cluster.engine.handle.pid

        def kill(num_tokens: int) -> None:
            if num_tokens == 5:
                os.kill(victim, signal.SIGKILL)

        answer = await asyncio.wait_for(ask(relay, prompt, LONG, kill), 90)
        assert answer.num_attempts == 2
        assert [event.index for event in answer.tokens] == list(range(LONG.max_tokens))
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        await check_drafted(relay, way)

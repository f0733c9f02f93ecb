"""An engine on the emulated device serves a prompt far longer than any other test's, and its process takes little more
memory than weights and KV."""

import asyncio
import json
import random
import resource
import sys

import pytest

from baton.modeling.device.copying import UNBOUND
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.sampling_params import SamplingParams
from tests.support.engines.generation import harness
from tests.support.models.reference import check_equal_tokens
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

MAX_POSITION = 131_072
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
MOST_BESIDES = 512 * 2**20
"""For torch, the process and the activations of a step, in bytes."""


@pytest.mark.parametrize(
    "num_tokens",
    [pytest.param(20_000, marks=pytest.mark.ci), pytest.param(100_000, marks=[pytest.mark.ci, pytest.mark.nightly])],
)
async def test_a_long_prompt_takes_its_kv_and_little_else(num_tokens: int) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(num_tokens)), stdout=asyncio.subprocess.PIPE
    )
    told, _ = await child.communicate()
    assert child.returncode == 0
    found = json.loads(told)
    assert found["peak"] <= found["kv"] + found["weights"] + MOST_BESIDES
    check_equal_tokens(decoder_on(None), prompt(num_tokens), found["tokens"], PARAMS)


def decoder_on(device: Device | None) -> Decoder:
    return random_decoder(max_position=MAX_POSITION, device=device)


def prompt(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(97), k=num_tokens)


def main(num_tokens: int) -> None:
    """Serve the prompt, and print the tokens and the memory of this process in bytes."""
    decoder = decoder_on(EmulatedDevice(UNBOUND))
    with harness(
        decoder=decoder, num_slots=1, max_slot_tokens=MAX_POSITION, max_batched_tokens=2048, poison=False
    ) as served:
        events = served.answer(prompt(num_tokens), PARAMS).events
    tokens = [event.token.token_id for event in events if event.token is not None]
    kv = decoder.layout.token_bytes * (num_tokens + len(tokens))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tokens": tokens, "kv": kv, "weights": weight_bytes(decoder.weights), "peak": peak}))


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A real chain on the sample model in bf16: its KV is as close to fp32 as one process's is, over 2,048 positions."""

from itertools import pairwise
from pathlib import Path

import pytest

from baton.modeling.checkpoints.weights import load_decoder
from baton.types import TokenRange
from tests.support.engines.chains import ChainGroup, reference
from tests.support.models.texts import passage_ids

NUM_TOKENS = 2048
MAX_RATIO = 1.1


@pytest.mark.ci
def test_uneven_chains_err_no_more_than_one_process(smollm2: Path) -> None:
    token_ids = passage_ids(smollm2, NUM_TOKENS)
    exact, _ = reference(load_decoder(smollm2, dtype="float32"), token_ids)
    rounded = load_decoder(smollm2, dtype="bfloat16")
    single, _ = reference(rounded, token_ids)
    at_once = (single - exact).square().mean().sqrt()
    assert at_once > 0.001, "bf16 must differ from fp32, else nothing was compared"
    for cuts in ([0, 1300, NUM_TOKENS], [0, 1100, 1101, 1500, NUM_TOKENS]):
        chunks = [TokenRange(start, end) for start, end in pairwise(cuts)]
        with ChainGroup(rounded, len(chunks)) as group:
            kv = group.submit(group.prepare(token_ids, chunks)).kv(rounded.layout)
        in_chain = (kv - exact).square().mean().sqrt()
        print(f"RMS KV error against fp32: at once {at_once:.5f}, {len(chunks)} ranks {in_chain:.5f}")
        assert in_chain <= MAX_RATIO * at_once

"""Checks of a live cluster after a trace was played against it."""

import asyncio

import numpy as np

from baton.modeling.checkpoints.weights import load_decoder
from tests.support.models.reference import check_equal_tokens
from tests.support.paced.cluster import PacedCluster
from tests.support.paced.load import Played


async def check_served(cluster: PacedCluster, played: Played) -> None:
    """Check that all requests have all their tokens, that a sample of requests has the tiny model's tokens, and that no
    resource is held."""
    assert not played.errors
    assert [len(fate.token_ids) for fate in played.fates] == played.trace.output_tokens.tolist()
    decoder = await asyncio.to_thread(load_decoder, cluster.folder, dtype="float32")
    for number in np.linspace(0, len(played.fates) - 1, 8).astype(int).tolist():
        tokens = played.prompt(number), played.fates[number].token_ids
        await asyncio.to_thread(check_equal_tokens, decoder, *tokens, played.params(number))
    await cluster.until_empty()

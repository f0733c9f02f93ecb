"""A cluster whose processes listen on the IPv6 loopback address only: clients, slots, links of a chain, and metrics."""

from pathlib import Path

import httpx2
import pytest

from baton import AsyncClient
from baton.sampling_params import SamplingParams
from baton.settings.addresses import join_address
from deploy.config.file import WrittenConfig
from tests.support.clusters.kept import KeptCluster, kept
from tests.support.engines.generation import prompt
from tests.support.models.letter_models import write_letter_model
from tests.support.tools import has_ipv6

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")]

PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=3, ignore_eos=True)


@pytest.mark.ci
async def test_a_chain_and_an_engine_serve_at_an_ipv6_address(tmp_path: Path) -> None:
    write_letter_model(tmp_path)
    config = WrittenConfig(
        {
            "model": {"dtype": "float32"},
            "prefill": {"num_ranks": 2, "num_threads": 1},
            "generate": {"num_threads": 1, "num_slots": 2},
            "orchestrator": {"host": "::1", "port": 0, "disaggregation": "always"},
            "worker_host": "::1",
        }
    ).config
    made = KeptCluster(config=config, folder=tmp_path)
    async with kept(made), AsyncClient(made.target) as client:
        output = await client.generate(token_ids=prompt(40), params=PARAMS).collect()
        assert len(output.tokens) == 8 and output.usage is not None
        state = await client.cluster_state()
        assert all(endpoint.startswith("[::1]:") for group in state.groups for endpoint in group.endpoints)
        (chain,) = (group for group in state.groups if group.role == "prefill")
        assert chain.epoch == 1 and sum(rank.num_jobs_done for rank in chain.ranks.values()) >= 1
        assert made.keeper is not None and made.keeper.ports[1]
        async with httpx2.AsyncClient() as http:
            answer = await http.get(f"http://{join_address('::1', made.keeper.ports[1])}/metrics")
        assert answer.status_code == 200 and "baton_" in answer.text

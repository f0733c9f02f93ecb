"""Configurations of the local clusters that benchmarks measure."""

from typing import Any

from deploy.config.cluster import ClusterConfig
from deploy.config.file import WrittenConfig


def local_config(
    dtype: str, *, num_ranks: int, prefix_share: float = 0.0, link: int = 0, **generate: Any
) -> ClusterConfig:
    """Return the configuration of a cluster with one engine and one prefill chain of `num_ranks` ranks. If `num_ranks`
    is 0, the cluster has no chain.

    By default, the prefix cache is off, because prompts repeat, and the engine uses one thread and no speculation.
    `generate` overrides settings of the engine. `link` is the rate of the link to an emulated device, in bytes per
    second; 0 means as fast as the machine copies.
    """
    chain = {"num_ranks": num_ranks} if num_ranks else {"num_groups": 0}
    return WrittenConfig(
        {
            "model": {"dtype": dtype},
            "prefill": {**chain, "prefix_share": prefix_share},
            "device": {"link": link},
            "generate": {"num_threads": 1, "speculation": "off", **generate},
        }
    ).local.config

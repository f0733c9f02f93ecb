"""Configurations of the local clusters that benchmarks measure."""

from typing import Any

from deploy.config.cluster import ClusterConfig
from deploy.config.file import WrittenConfig


def local_config(
    dtype: str, *, num_ranks: int, prefix_share: float = 0.0, link: int = 0, **generate: Any
) -> ClusterConfig:
    """Return the configuration of one engine and, unless `num_ranks` is 0, one chain. By default, prefixes are not
    cached, because prompts repeat, and the engine uses one thread and no speculation; `generate` overrides settings of
    the engine. `link`: rate of the link to an emulated device in bytes per second; 0: as fast as the machine copies."""
    chain = {"num_ranks": num_ranks} if num_ranks else {"num_groups": 0}
    return WrittenConfig(
        {
            "model": {"dtype": dtype},
            "prefill": {**chain, "prefix_share": prefix_share},
            "device": {"link": link},
            "generate": {"num_threads": 1, "speculation": "off", **generate},
        }
    ).local.config

"""What a Ray that `baton serve` starts declares: what is there and asked for, and no invented number."""

import pytest

from deploy.commands.serve import declared_pools
from deploy.config.file import load_config


@pytest.mark.parametrize(
    ("num_cores", "settings", "pools"),
    [
        (2, (), (4, 2)),  # one group of two ranks and one engine, and one more of each
        (64, (), (64, 2)),  # an engine takes all cores
        (64, ("prefill.num_threads=8", "generate.num_threads=16"), (8, 4)),
        (2, ("prefill.num_groups=3", "prefill.num_ranks=4", "generate.num_groups=5"), (16, 6)),
        (2, ("prefill.num_groups=0",), (2, 2)),
        (2, ("autoscaling.mode=act", "autoscaling.max=4"), (8, 4)),  # at most three of one role
    ],
)
def test_pools_are_as_large_as_the_cores_and_the_configuration_make_them(
    num_cores: int, settings: tuple[str, ...], pools: tuple[int, int]
) -> None:
    config = load_config(None, settings)
    assert declared_pools(config, num_cores) == dict(zip(("baton_prefill", "baton_generate"), pools, strict=True))

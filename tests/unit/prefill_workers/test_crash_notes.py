"""Each rank names the job of its turn in its crash note, and only meanwhile."""

from baton.process.crash_notes import fingerprint
from baton.types import TokenRange
from tests.support.engines.chains import ChainGroup
from tests.support.models.tiny_models import random_decoder


class Noted:
    """Keeps what an engine has noted, in place of its note."""

    def __init__(self) -> None:
        self.names: tuple[bytes, ...] = ()

    def set(self, names: tuple[bytes, ...]) -> None:
        self.names = names


def test_a_rank_names_the_job_that_it_computes() -> None:
    seen: list[tuple[int, tuple[bytes, ...]]] = []
    with ChainGroup(random_decoder(num_layers=2), 2) as group:
        noted = [Noted() for _ in group.engines]
        for engine, each in zip(group.engines, noted, strict=True):
            vars(engine)["_computed"] = each
        ids = range(20)
        run = group.prepare(
            ids,
            [TokenRange(0, 12), TokenRange(12, 20)],
            on_push=lambda rank, layer: seen.append((rank, noted[rank].names)),
        )
        for future in group.submit(run).futures.values():
            future.result(30)
        group.wait_idle()
        assert sorted(seen) == [(rank, (fingerprint("request-1", ids),)) for rank in (0, 0, 1, 1)]
        assert [each.names for each in noted] == [(), ()]

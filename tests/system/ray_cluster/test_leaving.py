"""A cluster on Ray that ends, by whatever way: nothing of it is left."""

from pathlib import Path

import pytest

from tests.support.clusters.ray_clusters import launched, processes_of, recorded_folder, served, shared_files, until

pytestmark = pytest.mark.cluster


@pytest.mark.ci
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("interrupt", marks=pytest.mark.nightly),
        "stop",
        "kill the launcher, then stop",
    ],
)
def test_nothing_is_left(smollm2: Path, tmp_path: Path, how: str) -> None:
    with served(tmp_path, smollm2, "prefill.num_ranks=1") as running:
        assert processes_of(running.ray_folder)
        assert shared_files(tmp_path)
        if how == "interrupt":
            running.interrupt()
            assert running.process.wait(60) == 0
        else:
            if how.startswith("kill"):
                running.process.kill()
                running.process.wait()
            stopped = running.command("stop")
            assert stopped.returncode == 0, stopped.stderr
    assert not processes_of(running.ray_folder)
    assert not Path(running.ray_folder).exists()
    assert not shared_files(tmp_path)
    assert not list((tmp_path / "baton" / "clusters").iterdir())


@pytest.mark.ci
@pytest.mark.parametrize("line", ["starting Ray", "starting 2 workers"])
def test_an_interrupted_start_leaves_nothing(smollm2: Path, tmp_path: Path, line: str) -> None:
    with launched(tmp_path, smollm2, "prefill.num_ranks=1") as starting:
        until(lambda: line in starting.stderr)
        folder = recorded_folder(tmp_path)
        until(lambda: bool(processes_of(folder)))
        starting.interrupt()
        assert starting.process.wait(60) == 0
    assert starting.stderr.splitlines()[-1] == "cluster baton is gone"
    assert not processes_of(folder)
    assert not Path(folder).exists()
    assert not list((tmp_path / "baton" / "clusters").iterdir())

"""`baton serve` that fails before its Ray is up: one line says why, and nothing is left."""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deploy.cli import main
from deploy.top import command as top
from tests.support.clusters.on_ray.ray_clusters import run_baton
from tests.support.models.letter_models import write_letter_model

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import package_of_ray", "package package_of_ray cannot be imported (No module named 'package_of_ray'): "),
        ("raise ImportError('too old\\nby far')", "package ray cannot be imported (too old): "),
    ],
)
def test_a_ray_that_cannot_be_imported_is_named_in_one_line_and_leaves_nothing(
    text: str, line: str, tmp_path: Path
) -> None:
    package, cache, model, temporary = (tmp_path / each for each in ("first/ray", "cache", "model", "temporary"))
    for folder in (package, cache, model, temporary):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    write_letter_model(model)
    environment = {"PYTHONPATH": str(package.parent), "TMPDIR": str(temporary)}
    settings = ("--set", f"model.name={model}", "--set", "http.port=-1")
    ended = run_baton(cache, "serve", *settings, environment=environment)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1].startswith(f"baton: {line}"), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [*(cache / "baton" / "clusters").iterdir()] and not [*temporary.iterdir()]


def test_a_missing_module_of_baton_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise ModuleNotFoundError("No module named 'orchestrator.absent'", name="orchestrator.absent")

    monkeypatch.setattr(top, "run", run)
    with pytest.raises(ModuleNotFoundError):
        main(["top"])


_START = """
import sys, tempfile
from ray._private import services
from baton.errors import UnavailableError
from deploy.commands import serve
from deploy.config.file import load_config

services.GCS_SERVER_EXECUTABLE = "/absent/gcs_server"
tempfile.tempdir = sys.argv[1]
try:
    with serve._ray(load_config(None)):
        pass
except UnavailableError as error:
    print(error)
"""


def test_a_ray_whose_binary_cannot_be_started_leaves_nothing(cache: Path) -> None:
    """In a process without other threads: a child that such a process forks may abort before it tells why."""
    with TemporaryDirectory(prefix="baton-") as temporary:  # short: sockets lie below it
        command = [sys.executable, "-c", _START, temporary]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
        assert re.match("Ray on this machine cannot be reached: .*/absent/gcs_server", run.stdout), run.stderr
        assert not [*Path(temporary).iterdir()]
    assert not [*(cache / "baton" / "clusters").iterdir()]

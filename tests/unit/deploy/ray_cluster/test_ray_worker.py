"""A worker's node is measured before its model is loaded, unless a launcher has prepared it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from baton.types import DeviceName
from deploy.ray_cluster import ray_worker
from tests.support.clusters.workers import tiny_worker


@pytest.mark.parametrize(
    ("host", "device", "is_missing", "measured"),
    [
        ("", "cpu", True, [("cpu", "float32")]),
        ("", "auto", True, [("cpu", "float32")]),
        ("", "cpu", False, []),
        ("", "cuda", True, []),
        ("127.0.0.1", "cpu", True, []),
    ],
)
def test_cores_of_a_node_that_no_launcher_has_prepared_are_measured(
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    device: DeviceName,
    is_missing: bool,
    measured: list[tuple[str, str]],
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(namespace="here"))
    monkeypatch.setattr(ray_worker, "node_address", lambda: "10.0.0.2")
    monkeypatch.setattr(ray_worker, "folder_on_node", lambda place: Path("/found"))
    monkeypatch.setattr(ray_worker, "section_on_node", lambda section, place: section)
    monkeypatch.setattr(ray_worker, "must_measure", lambda device, dtype_bytes: is_missing and dtype_bytes == 4)
    monkeypatch.setattr(ray_worker, "measure_in_child", lambda *arguments: asked.append(arguments))
    config = tiny_worker("prefill")
    place = replace(config.place, host=host, device=device, dtype="float32")
    here = ray_worker._on_this_node(replace(config, place=place)).place
    assert asked == measured
    assert (here.host, here.model_folder) == (host or "10.0.0.2", Path("/found"))

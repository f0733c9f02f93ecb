"""Properties of this machine, as programs of its drivers report them."""

from pathlib import Path

import pytest

from deploy.machine.this_machine import gpu_name

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("script", "name"), [("echo NVIDIA H200", "NVIDIA H200"), ("echo no driver >&2; exit 9", ""), ("", "")]
)
def test_the_driver_names_the_gpu(script: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that fails, or none at all, leaves the GPU without a name."""
    if script:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu_name.cache_clear()
    try:
        assert gpu_name() == name
    finally:
        gpu_name.cache_clear()

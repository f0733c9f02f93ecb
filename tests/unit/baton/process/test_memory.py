"""How much memory is free: what the machine has, or what a container leaves of it."""

from pathlib import Path

import pytest

from baton.process.memory import free_bytes, memory_bytes


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 5 << 10), ("max", 5 << 10), (str(6 << 10), 2 << 10), ("100", 0)]
)
def test_free_memory_is_the_machine_s_or_the_container_s(tmp_path: Path, limit: str | None, expected: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       9 kB\nMemAvailable:   5 kB\nHugePages_Free:    0\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{4 << 10}\n")
        (tmp_path / "memory.stat").write_text("anon 4096\ninactive_file 0\nactive_file 0\n")
    assert free_bytes(meminfo, tmp_path) == expected
    assert memory_bytes(meminfo, tmp_path) == (9 << 10 if limit in (None, "max") else int(limit))


def test_pages_of_files_are_free_memory_in_a_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:   100 kB\n")
    (tmp_path / "memory.max").write_text("6000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 4000\ninactive_file 3000\nactive_file 500\n")
    assert free_bytes(meminfo, tmp_path) == 4500

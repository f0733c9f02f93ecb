"""Commands of peers: all cores compute, options come last, and llama.cpp's weights are named as they are stored."""

from pathlib import Path

import pytest
from gguf import LlamaFileType

from benchmarks.sides.peer_commands import llama_cpp, vllm
from tests.support.models.tiny_gguf import tiny_keys, tiny_tensors, write_gguf


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_vllm_computes_on_all_cores_and_its_own_options_come_last() -> None:
    variables = {"VLLM_CPU_KVCACHE_SPACE": "9"}
    peer = vllm(Path("python"), Path("model"), "float32", [0, 2], options=["--x=1"], environment=variables)
    command = list(peer.command)
    assert "VLLM_CPU_OMP_THREADS_BIND=0,2" in command
    assert "VLLM_CPU_KVCACHE_SPACE=9" in command
    assert option(command, "--dtype") == peer.weights == "float32"
    assert command[-1] == "--x=1"
    assert command[0] == "env"


@pytest.mark.parametrize(
    ("keys", "stored"),
    [({"general.file_type": int(LlamaFileType.MOSTLY_Q4_1)}, "Q4_1"), ({}, "unknown")],
)
def test_llama_cpp_has_a_slot_for_each_stream_and_names_its_weights(
    tmp_path: Path, keys: dict[str, object], stored: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", {**tiny_keys("llama"), **keys}, tiny_tensors("llama"))
    peer = llama_cpp(Path("server"), path, [0, 2], 3, options=["--x=1"])
    command = list(peer.command)
    assert peer.weights == f"{stored}, as stored in tiny.gguf"
    assert option(command, "--threads") == "2"
    assert option(command, "--parallel") == "3"
    assert option(command, "--ctx-size") == str(3 * 8192)
    assert command[-1] == "--x=1"

"""Commands and settings of the servers that Baton is compared with, chosen for their best performance on the given
cores.

Prefix caching is off in all servers, so that every prompt is computed. Logging of requests is off too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gguf import GGUFReader, LlamaFileType

from benchmarks.sides.peer_server import MODEL, Peer

VLLM, LLAMA_CPP = "vllm", "llama.cpp"
_VLLM_MODULE = "vllm.entrypoints.openai.api_server"
"""Module that `vllm serve` runs. It is run directly, because the command `vllm serve` fails in the CPU build, whose
package has a different name."""
_VLLM_KV_GB = 4
_MAX_TOKENS = 8192
"""Maximum number of tokens of a sequence."""
_FILE_TYPE = "general.file_type"


def vllm(
    python: Path,
    model: Path,
    dtype: str,
    cores: Sequence[int],
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str],
) -> Peer:
    """Return vLLM's CPU build (peers/setup_vllm_cpu.sh) with one thread per core. `python` is the Python of its
    environment, and `model` a Hugging Face folder. `options` and `environment` are additional options and environment
    variables of `vllm serve`.

    Chunked prefill is on, with vLLM's default chunk size for servers. OMP_NUM_THREADS is not set, because with it
    vLLM's other processes would busy-wait, according to vLLM's warning.
    """
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GB),
        **environment,
    }
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), str(python), "-m", _VLLM_MODULE]
    command += ["--model", str(model), "--served-model-name", MODEL, "--dtype", dtype]
    command += ["--max-model-len", str(_MAX_TOKENS), "--enable-chunked-prefill", "--no-enable-prefix-caching"]
    return Peer(
        VLLM,
        weights=dtype,
        command=[*command, "--disable-uvicorn-access-log", *options],
        version=("/version", "version"),
        count=("usage", "completion_tokens"),
        fields={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )


def llama_cpp(server: Path, model: Path, cores: Sequence[int], num_slots: int, *, options: Sequence[str] = ()) -> Peer:
    """Return llama.cpp's `llama-server` (peers/setup_llamacpp.sh), with one thread per core and `num_slots` slots.
    `model` is a GGUF file, whose weights are used as stored. `options` are additional options of `llama-server`.

    Each slot has memory for a sequence of the maximum length. The comments that `llama-server` sends on silent streams
    are turned off.
    """
    command = [str(server), "--model", str(model), "--alias", MODEL, "--threads", str(len(cores))]
    command += ["--parallel", str(num_slots), "--ctx-size", str(num_slots * _MAX_TOKENS)]
    return Peer(
        LLAMA_CPP,
        weights=f"{_stored_as(model)}, as stored in {model.name}",
        command=[*command, "--cache-ram", "0", "--log-verbosity", "1", *options],
        version=("/props", "build_info"),
        count=("timings", "predicted_n"),
        fields={"timings_per_token": True, "cache_prompt": False, "sse_ping_interval": -1},
    )


def _stored_as(model: Path) -> str:
    """Return the format of most weights of a GGUF file, for example Q4_1."""
    field = GGUFReader(model).fields.get(_FILE_TYPE)
    return "unknown" if field is None else LlamaFileType(field.contents()).name.removeprefix("MOSTLY_")

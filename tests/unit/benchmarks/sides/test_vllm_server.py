"""vLLM's server is up when it says so, its end before that is an error with its words, and nothing of it is left."""

import sys
from pathlib import Path

import pytest

from benchmarks.sides.vllm_server import VllmSpec, vllm_server

pytestmark = pytest.mark.integration

SERVER = """#!{python}
import http.server, sys
if "--broken" in sys.argv:
    sys.exit("no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"version": "1.0"}}')
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
print("INFO:     Application startup complete.", flush=True)
server.serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """What is run in the place of a Python that has vLLM."""
    path = tmp_path / "python"
    path.write_text(SERVER.format(python=sys.executable))
    path.chmod(0o755)
    return path


async def test_a_server_that_is_up_is_yielded_with_its_version(python: Path) -> None:
    async with vllm_server(VllmSpec(python, Path("model"), "bfloat16", [0])) as door:
        assert door.version == "1.0"


async def test_a_server_that_ends_early_is_an_error_with_its_words(python: Path) -> None:
    with pytest.raises(RuntimeError, match="(?s)ended before it served.*no such model"):
        async with vllm_server(VllmSpec(python, Path("model"), "bfloat16", [0], ["--broken"])):
            pass


def test_all_cores_compute_and_options_come_last() -> None:
    spec = VllmSpec(Path("python"), Path("model"), "float32", [0, 2], ["--x=1"], {"VLLM_CPU_KVCACHE_SPACE": "9"})
    command = spec.command(80)
    assert "VLLM_CPU_OMP_THREADS_BIND=0,2" in command
    assert "VLLM_CPU_KVCACHE_SPACE=9" in command
    assert command[command.index("--dtype") + 1] == "float32"
    assert command[-1] == "--x=1"
    assert command[0] == "env"

"""A peer is up when it is healthy, its end before that is an error with its words, and it is called as it counts."""

import sys
from pathlib import Path

import pytest

from benchmarks.sides.peer_server import Peer, peer_server
from benchmarks.support.answers import Ask

pytestmark = pytest.mark.integration

SERVER = """
import http.server, json, sys
if "--broken" in sys.argv:
    sys.exit("no such model")
HEALTH, TOTALS = [503, 503, 200], json.loads(sys.argv[1])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        status = HEALTH.pop(0) if self.path == "/health" else 200 if not HEALTH else 503
        body = b'{"build": "1.0"}' if status == 200 else b'{"build": "unhealthy"}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["prompt"] == [1, 2] and asked["max_tokens"] == 3 and asked["ignore_eos"] and asked["own"]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = [json.dumps({"sums": {"made": total}}) for total in TOTALS] + ["[DONE]"]
        for event in events:
            data = f"data: {event}\\n\\n".encode()
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(data), data))
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()
"""


def peer(tmp_path: Path, *options: str, totals: str = "[1, 1, 3, 3]", count: str = "sums") -> Peer:
    """A peer whose messages have these totals of tokens."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, str(script), totals, *options]
    return Peer("other", "f32", command, version=("/about", "build"), count=(count, "made"), fields={"own": True})


async def test_a_server_is_yielded_with_its_version_once_it_is_healthy(tmp_path: Path) -> None:
    async with peer_server(peer(tmp_path)) as door:
        assert door.version == "1.0"
        assert door.pids()


async def test_a_server_that_ends_early_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="(?s)other ended before it served.*no such model"):
        async with peer_server(peer(tmp_path, "--broken")):
            pass


async def test_messages_that_bring_tokens_count_once(tmp_path: Path) -> None:
    async with peer_server(peer(tmp_path)) as door:
        (answer,) = (await door.answer([Ask((1, 2), 3)])).answers
    assert answer.num_tokens == 3
    assert len(answer.message_ns) == 2


@pytest.mark.parametrize(
    ("totals", "count", "error"),
    [("[1, 2]", "sums", "asked for 3 tokens"), ("[1, 3]", "usage", "not a message with 'usage'")],
)
async def test_other_answers_are_refused(tmp_path: Path, totals: str, count: str, error: str) -> None:
    async with peer_server(peer(tmp_path, totals=totals, count=count)) as door:
        with pytest.raises(RuntimeError, match=error):
            await door.answer([Ask((1, 2), 3)])

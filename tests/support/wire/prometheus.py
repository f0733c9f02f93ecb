"""A real Prometheus with the configuration of the manifests. It scrapes the targets that a test names."""

import asyncio
import json
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.eventually import eventually
from tests.support.manifests import OBSERVABILITY, SERIES

_LISTENING = re.compile(rb'msg="Listening on" address=(\S+)')
_READY = b"Server is ready to receive web requests"


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    address: str

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the current samples of an expression. Fails if Prometheus rejects the expression."""
        answer = await self._get("query", query=expr)
        assert answer["status"] == "success", f"{expr}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    async def value(self, expr: str) -> float:
        """Return the value of an expression with at most one sample; 0 if it has none."""
        found = await self.query(expr)
        assert len(found) <= 1, f"{expr}: {found}"
        return float(found[0]["value"][1]) if found else 0.0

    async def families(self) -> set[str]:
        """Return the metric families that its targets declare, including families without samples."""
        return {SERIES.sub("", name) for name in (await self._get("metadata"))["data"]}

    async def rules(self) -> list[dict[str, Any]]:
        """Return its alerting rules, with their health after the last evaluation."""
        groups = (await self._get("rules"))["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def until_scraped(self, times: int, since: float = 0.0) -> float:
        """Wait until each target has been scraped `times` more times. Return the current number of scrapes."""
        expr = "min(count_over_time(up[1h]) and on (instance) up == 1)"
        return await eventually(lambda: self.value(expr), lambda num: num >= since + times, within_s=30)

    async def _get(self, path: str, **fields: str) -> dict[str, Any]:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"

        def read() -> dict[str, Any]:
            try:
                with urllib.request.urlopen(url, timeout=60) as reply:
                    answer: dict[str, Any] = json.loads(reply.read())
            except urllib.error.HTTPError as error:
                answer = json.loads(error.read())
            return answer

        return await asyncio.to_thread(read)


@asynccontextmanager
async def prometheus(program: str, folder: Path, targets: Sequence[str]) -> AsyncIterator[Prometheus]:
    """Run Prometheus inside the context. Its files are stored in `folder`. Its configuration is that of the manifests,
    with shorter intervals."""
    config = (OBSERVABILITY / "prometheus.yaml").read_text()
    assert "scrape_interval: 5s" in config and "evaluation_interval: 15s" in config
    config = config.replace("scrape_interval: 5s", "scrape_interval: 250ms")
    (folder / "prometheus.yaml").write_text(config.replace("evaluation_interval: 15s", "evaluation_interval: 500ms"))
    shutil.copy(OBSERVABILITY / "alerts.yaml", folder)
    (folder / "targets").mkdir()
    (folder / "targets/test.yaml").write_text(f"- targets: {json.dumps(list(targets))}\n")
    running = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )
    assert running.stderr is not None
    said = b""
    try:
        while not (_READY in said and (listening := _LISTENING.search(said))):
            line = await asyncio.wait_for(running.stderr.readline(), 30)
            assert line, said.decode()
            said += line
        reading = asyncio.create_task(running.stderr.read())  # so that Prometheus never blocks on a full pipe
        yield Prometheus(listening[1].decode())
        running.terminate()
        assert await asyncio.wait_for(running.wait(), 30) == 0, (await reading).decode()
        await reading
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()

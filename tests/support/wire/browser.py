"""A real Chromium in headless mode, driven by Playwright."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright


@asynccontextmanager
async def browser(program: str) -> AsyncIterator[Browser]:
    """Run the browser inside the context. It sends no telemetry and no requests of its own. The sandbox is off if the
    user is root (tests in a container), because Chromium does not support it then."""
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=program, args=quiet, chromium_sandbox=os.geteuid() != 0
        )
        try:
            yield launched
        finally:
            await launched.close()

"""A real Chromium without a window, driven by Playwright."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright


@asynccontextmanager
async def browser(program: str) -> AsyncIterator[Browser]:
    """Runs the program until left. It reports nothing home and asks no host for anything by itself; root, which tests
    in a container may be, cannot have its sandbox."""
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=program, args=quiet, chromium_sandbox=os.geteuid() != 0
        )
        try:
            yield launched
        finally:
            await launched.close()

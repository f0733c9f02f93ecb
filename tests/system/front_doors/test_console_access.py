"""Accessibility of the console: by keyboard only, on a phone, in both colour schemes, and without animations."""

import pytest
from playwright.async_api import Page, expect

from baton.sampling_params import SamplingParams
from tests.support.engines.generation import prompt
from tests.support.engines.prefixes import prefix_folder
from tests.support.tools import find_command
from tests.support.wire.console import SCREENS, console
from tests.support.wire.contrast import too_faint

pytestmark = [pytest.mark.integration, pytest.mark.ci]  # needs a browser, and takes some seconds for each start of one

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)


@pytest.fixture
def program() -> str:
    found = find_command("chromium")
    if found is None:
        pytest.skip("chromium is not installed: tools/install_debian_tools.sh")
    return found


async def test_the_keyboard_alone_does_it(program: str) -> None:
    async with console(program) as at:
        page, keys = at.page, at.page.keyboard
        await expect(page.locator("#health")).to_have_text("serving")
        await keys.press("Tab")
        assert await focused(page) == "Skip to the content"
        seen = [await tab(page) for _ in SCREENS]
        assert seen == ["Cluster", "Requests", "KV memory", "Playground"]
        await keys.press("Enter")
        await expect(page.locator("#screen-playground")).to_be_visible()
        for _ in range(20):
            if await tab(page) == "prompt":
                break
        await keys.type("Once upon a time")
        at.made.group_gates[0].shut(num_passes=12)
        await keys.press("Control+Enter")
        await expect(page.locator(".answer .token").nth(1)).to_be_visible()
        await keys.press("Escape")
        await expect(page.locator("#progress")).to_contain_text("Stopped after")
        at.made.group_gates[0].open()
        await at.made.until_empty(10.0)
        for _ in range(20):
            if await tab(page) == "Send":
                break
        await keys.press("Enter")
        await expect(page.locator("#progress")).to_contain_text("Done: ")


async def tab(page: Page) -> str:
    """Go to the next element, which must show that it has the focus; return what it is called."""
    await page.keyboard.press("Tab")
    outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    name = await focused(page)
    assert outline != "none", f"{name} does not show its focus"
    return name


async def focused(page: Page) -> str:
    found: str = await page.evaluate(
        """() => {
            const { id, textContent } = document.activeElement;
            return document.activeElement.matches('a, button') ? textContent : id;
        }"""
    )
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read_in_both_schemes(program: str, scheme: str) -> None:
    with prefix_folder() as folder:
        folders = {"prefill": folder, "generate": folder}
        async with console(program, shows={"color_scheme": scheme}, folders=folders, prefix_bytes=2**20) as at:
            page = at.page
            red, *_ = await page.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
            )
            assert (red > 200) == (scheme == "light")
            await at.open("playground")
            await at.ask("Once", max_tokens="20")
            await expect(page.locator("#progress")).to_contain_text("Done")
            await page.locator("#token-details summary").click()
            for screen in SCREENS:
                await at.open(screen)
                if screen == "requests":
                    await page.locator("#requests summary").first.click()
                assert await too_faint(page) == [], screen


async def test_a_phone_shows_all_of_it_without_scrolling_sideways(program: str) -> None:
    shows = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    async with console(program, shows=shows, num_ranks=3, num_groups=2) as at:
        await at.made.ask(at.made.request(prompt(40), PARAMS))
        await at.open("playground")
        await at.ask("Once upon a time " * 8, max_tokens="60")
        await expect(at.page.locator("#progress")).to_contain_text("Done")
        await at.page.locator("#token-details summary").click()
        for screen in SCREENS:
            await at.open(screen)
            if screen == "requests":
                await at.page.locator("#requests summary").first.click()
            assert await at.page.evaluate("document.documentElement.scrollWidth") <= 390, screen


async def test_reduced_motion_is_heeded(program: str) -> None:
    async with console(program, shows={"reduced_motion": "reduce"}) as at:
        await at.made.ask(at.made.request(prompt(9), PARAMS))
        await at.open("requests")
        segment = at.page.locator("#requests .segment").first
        await expect(segment).to_have_css("transition-duration", "0s")
        await at.page.emulate_media(reduced_motion="no-preference")
        await expect(segment).not_to_have_css("transition-duration", "0s")

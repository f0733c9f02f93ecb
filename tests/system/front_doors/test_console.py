"""The web console in a real Chromium, with a real gateway, orchestrator and engines: what users see and do."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import expect

from baton.sampling_params import SamplingParams
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import HASTY
from tests.support.engines.generation import prompt
from tests.support.engines.prefixes import prefix_folder
from tests.support.models.tiny_tokenizer import chat_letters
from tests.support.tools import find_command
from tests.support.wire.console import console, requests

pytestmark = [pytest.mark.integration, pytest.mark.ci]  # needs a browser, and takes some seconds for each start of one

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, seed=4, ignore_eos=True)


@pytest.fixture
def program() -> str:
    found = find_command("chromium")
    if found is None:
        pytest.skip("chromium is not installed: tools/install_debian_tools.sh")
    return found


async def test_both_pools_are_shown_and_what_changes_is_seen(program: str) -> None:
    async with console(program, num_ranks=3, num_groups=2, num_slots=4) as at:
        page = at.page
        await expect(page).to_have_url(f"{at.http.url}/console/")
        await expect(page.locator("#health")).to_have_text("serving")
        chain = page.locator("#prefill-groups > li")
        await expect(chain.locator("h4")).to_have_text("chain")
        await expect(chain.locator(".rank strong")).to_have_text(["rank 0", "rank 1", "rank 2"])
        groups = page.locator("#generate-groups > li")
        await expect(groups.locator("h4")).to_have_text(["group-0", "group-1"])
        await expect(groups.locator(".badge")).to_have_text(["ready", "ready"])
        await expect(groups.nth(0).get_by_role("img")).to_have_attribute(
            "aria-label", "4 slots: 0 active, 0 leased, 4 free"
        )
        at.made.members.drain("group-1")
        await expect(groups.nth(1).locator(".badge")).to_have_text("drained")
        at.made.group_gates[0].shut(num_passes=6)
        call = at.made.open(at.made.request(prompt(20), LONG))
        await expect(groups.nth(0).get_by_role("img")).to_have_attribute(
            "aria-label", "4 slots: 1 active, 0 leased, 3 free"
        )
        await expect(page.locator("#totals")).to_contain_text("running1")
        at.made.group_gates[0].open()
        call.cancel()
        await at.made.until_empty(10.0)


async def test_a_request_s_row_grows_while_it_runs_and_tells_of_its_ranks(program: str) -> None:
    async with console(program) as at:
        page, rows = at.page, at.page.locator("#requests > li")
        await at.open("requests")
        await expect(page.locator("#no-requests")).to_be_visible()
        await at.made.ask(at.made.request(prompt(9), PARAMS))
        at.made.group_gates[0].shut()
        call = at.made.open(at.made.request(prompt(40), PARAMS))
        await expect(rows.locator("strong")).to_have_text(["#2", "#1"])
        await expect(rows.nth(0).locator(".badge")).to_have_text("generating")
        await expect(rows.nth(0)).to_contain_text("40 in, 1 out")
        await expect(rows.nth(1).locator(".badge")).to_have_text("length")
        names = "queue placement prefill transfer insert decode".split()
        await expect(rows.nth(0).locator("summary .segment")).to_have_class([f"segment stage-{name}" for name in names])
        await page.check("#only-open")
        await expect(rows).to_have_count(1)
        await rows.nth(0).locator("summary").focus()
        await page.keyboard.press("Enter")
        await expect(rows.nth(0).locator(".lanes dt")).to_contain_text([*names, "rank 0 prefill", "rank 0 transfer"])
        await page.uncheck("#only-open")
        at.made.group_gates[0].open()
        async for _ in call:
            pass
        await expect(rows.nth(0).locator(".badge")).to_have_text("length")
        await expect(rows.nth(0).locator("details")).to_have_attribute("open", "")  # as it was left


async def test_kv_is_shown_by_tier(program: str) -> None:
    with prefix_folder() as folder:
        config = replace(HASTY, block_tokens=16)
        async with console(
            program, config=config, folders={"prefill": folder, "generate": folder}, prefix_bytes=2**20, num_slots=4
        ) as at:
            await at.made.ask(at.made.request(prompt(40), PARAMS))
            await at.open("memory")
            slots, stores = at.page.locator("#slot-tiers > li"), at.page.locator("#store-tiers > li")
            await expect(slots).to_contain_text(["group-0"])
            state = await at.made.state()
            whole = next(group for group in state.groups if group.role == "generate").generation.kv.num_bytes
            await expect(slots).to_contain_text(f"free of {whole / 2**10:.0f} KiB")
            await expect(stores).to_have_count(1)
            await expect(stores.locator("h4")).to_have_text("chain, group-0")
            await expect(stores.get_by_role("img")).to_have_attribute(
                "aria-label", re.compile("^memory: [1-9].* of 1.0 MiB in [0-9]+ blocks")
            )
            at.made.group_gates[0].shut(num_passes=6)
            call = at.made.open(at.made.request(prompt(20), LONG))
            await expect(slots).to_contain_text("active")
            at.made.group_gates[0].open()
            call.cancel()
            await at.made.until_empty(10.0)


async def test_an_answer_comes_token_by_token_each_with_its_origin(program: str) -> None:
    async with console(program, generate={"speculation": "streaming", "draft_tokens": 3, "draft_keys": 32}) as at:
        await at.open("playground")
        page = at.page
        await at.ask("Once upon a time", max_tokens="40", temperature="0", seed="7")
        await expect(page.locator("#progress")).to_contain_text("Done: 40 tokens")
        expected = await at.http.openai.completions.create(
            model="letters", prompt="Once upon a time", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
        )
        assert await page.locator(".answer").text_content() == expected.choices[0].text
        spans = page.locator(".answer .token")
        await expect(spans).to_have_count(40)
        await expect(spans.nth(0)).to_have_class("token from-prefill")
        await expect(spans.nth(0)).to_have_attribute("title", "chain: last rank of the chain")
        state = await at.made.state()
        said = next(group for group in state.groups if group.role == "generate").generation.speculation
        ended = (await requests(at.made))[-1]
        num_accepted = sum(each.num_accepted for each in ended.timings.speculation.sources)
        assert said.num_drafted > 0 and num_accepted > 0
        await expect(page.locator(".answer .from-draft")).to_have_count(num_accepted)
        await expect(page.locator(".answer .from-step")).to_have_count(40 - 1 - num_accepted)
        await page.locator("#token-details summary").click()
        rows = page.locator("#token-rows tr")
        await expect(rows).to_have_count(40)
        await expect(rows.nth(0)).to_contain_text("chain")
        await expect(page.locator("#token-rows tr.from-draft").first).to_contain_text("of 3, streaming")
        first = await rows.nth(0).locator("td").all_text_contents()
        assert float(first[-1]) > 0 and float(first[-2]) > 0, "predicted, and taken"
        await expect(page.locator("#taken")).to_contain_text("from a prefill rank1")


async def test_a_stopped_answer_s_request_ends_on_the_server(program: str) -> None:
    async with console(program) as at:
        await at.open("playground")
        at.made.group_gates[0].shut(num_passes=12)
        await at.ask("Once upon a time", max_tokens="300")
        await expect(at.page.locator(".answer .token").nth(1)).to_be_visible()
        assert (await at.made.state()).num_running == 1
        await at.page.click("#stop")
        await expect(at.page.locator("#progress")).to_contain_text("Stopped after")
        at.made.group_gates[0].open()
        await at.made.until_empty(10.0)
        await at.open("requests")
        await expect(at.page.locator("#requests > li .badge")).to_have_text("cancelled")
        await at.open("playground")
        await at.ask("Again", max_tokens="5")
        await expect(at.page.locator("#progress")).to_contain_text("Done: 5 tokens")


async def test_errors_are_said_as_the_server_words_them(program: str) -> None:
    async with console(program) as at:
        await at.open("playground")
        await at.page.eval_on_selector("[name=max_tokens]", "field => field.removeAttribute('max')")
        await at.ask("Once", max_tokens="900")
        alert = at.page.locator("#refusal")
        await expect(alert).to_contain_text("max_tokens = 900")
        assert await alert.get_attribute("role") == "alert"
        await at.ask("Once", max_tokens="5")
        await expect(at.page.locator("#progress")).to_contain_text("Done: 5 tokens")
        await expect(alert).to_be_hidden()
        await at.made.server.stop()
        await at.open("cluster")
        await expect(at.page.locator("#trouble")).to_contain_text(f"{HOST}:{at.made.server.port}")
        await expect(at.page.locator("#health")).to_have_text("no answer")
        await expect(at.page.locator("#generate-groups h4")).to_have_text("group-0")  # older, and said to be


async def test_nothing_foreign_is_loaded_or_run(program: str) -> None:
    connected: list[asyncio.StreamWriter] = []
    other = await asyncio.start_server(lambda _, writer: connected.append(writer), HOST, 0)
    async with other, console(program) as at:
        url = f"http://{HOST}:{other.sockets[0].getsockname()[1]}/"
        found = await at.page.evaluate(
            """async (url) => {
                const seen = new Set();
                const all = new Promise((resolve) => document.addEventListener('securitypolicyviolation', (event) => {
                    seen.add(event.effectiveDirective);
                    if (seen.size === 3) resolve();
                }));
                const image = document.createElement('img');
                image.src = url;
                const script = document.createElement('script');
                script.textContent = 'window.ran = true';
                document.body.append(image, script);
                const refused = await fetch(url).catch((error) => error.name);
                await all;
                return [refused, window.ran === true, [...seen].sort()];
            }""",
            url,
        )
        assert found == ["TypeError", False, ["connect-src", "img-src", "script-src-elem"]]
        assert not connected
        at.asked[:] = [each for each in at.asked if each != url]  # what the browser was asked for, and refused


async def test_a_key_is_asked_for_and_kept_in_the_session_alone(program: str) -> None:
    tenants = Tenants((Tenant("acme", key_hashes=(hash_key("open sesame"),)),), require_key=True)
    async with console(program, key="open sesame", config=replace(HASTY, tenants=tenants)) as at:
        at.made.metadata = (("authorization", "Bearer open sesame"),)
        page = at.page
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("the call has no API key")
        await page.keyboard.type("a wrong key")
        await page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("the API key is unknown here")
        await expect(page.locator("#health")).to_have_text("API key needed")
        await page.keyboard.type("open sesame")
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_hidden()
        await expect(page.locator("#health")).to_have_text("serving")
        await at.open("playground")
        await at.ask("Once", max_tokens="5")
        await expect(page.locator("#progress")).to_contain_text("Done: 5 tokens")
        await at.open("requests")
        await page.locator("#requests summary").first.click()
        await expect(page.locator("#requests > li")).to_contain_text("acme")
        assert await page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        assert not [url for url in at.asked if "sesame" in url]
        other = await (await at.chrome.new_context()).new_page()
        await other.goto(f"{at.http.url}/console/")
        await expect(other.get_by_role("dialog")).to_be_visible()


async def test_a_chat_goes_on(program: str, tmp_path: Path) -> None:
    async with console(program, tokenizer=chat_letters(tmp_path), num_slots=4) as at:
        page = at.page
        await at.open("playground")
        await page.check("[name=mode][value=chat]")
        for number in (1, 2):
            await at.ask(f"Hello {number}", max_tokens="5")
            await expect(page.locator(".turn")).to_have_count(number)
            await expect(page.locator("#progress")).to_contain_text("Done: 5 tokens")
        lengths = [each.usage.num_prompt_tokens for each in await requests(at.made)]
        assert lengths[0] > lengths[1], "the second question comes after the first and its answer"
        await page.click("#clear")
        await expect(page.locator(".turn")).to_have_count(0)


async def test_a_page_that_is_paused_asks_nothing(program: str) -> None:
    async with console(program) as at:
        await expect(at.page.locator("#health")).to_have_text("serving")
        await at.page.click("#pause")
        await expect(at.page.locator("#health")).to_have_text("paused")
        num_asked = len(at.asked)
        other = await at.page.context.new_page()
        await other.goto(f"{at.http.url}/console/")
        await expect(other.locator("#generate-groups .badge")).to_have_text("ready")
        at.made.members.drain("group-0")
        await expect(other.locator("#generate-groups .badge")).to_have_text("drained")  # so time has passed
        await expect(at.page.locator("#generate-groups .badge")).to_have_text("ready")
        assert len(at.asked) == num_asked
        await at.page.click("#pause")
        await expect(at.page.locator("#generate-groups .badge")).to_have_text("drained")

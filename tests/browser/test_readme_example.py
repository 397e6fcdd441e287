"""The README's example for browsers, in a real browser, against a real gateway behind a network that breaks."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright

from shared.errors import InvalidRequest, Overloaded
from shared.messages import ErrorInfo
from tests.cutting_proxy import CuttingProxy
from tests.gateway.fake_mesh import FakeRequest
from tests.gateway.harness import CHAT, Harness, running_gateway
from tests.standstills import Standstills

_README = Path(__file__).parents[2] / "README.md"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def example() -> str:
    """The function in the README, without the call of it."""
    (block,) = re.findall(r"```js\n(.*?)```", _README.read_text(), re.DOTALL)
    source, call, _ = str(block).partition("\ngenerate([")
    assert call
    return source


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    executable = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield await browser.new_page()
        await browser.close()


async def generate(page: Page, harness: Harness, *addresses: str, key: str | None = None) -> asyncio.Task[Any]:
    """What the example's call comes to: the pieces and the text, or an error's words."""
    await page.goto(f"{harness.url}/healthz")  # browsers let only pages of this machine reach its loopback
    await page.add_script_tag(content=example())
    gateways = [address.replace("http://", "ws://") for address in addresses]
    script = """async ([gateways, key, body]) => {
        const pieces = (window.pieces = []);
        try {
            const text = await generate(gateways, key, body, (piece) => pieces.push(piece));
            return { text, pieces };
        } catch (error) {
            return { error: error.message, pieces };
        }
    }"""
    return asyncio.create_task(page.evaluate(script, [gateways, key, CHAT]))


async def taken(harness: Harness) -> FakeRequest:
    request = await harness.fake.next_request()
    await request.accept()
    return request


async def test_example_gives_the_text_in_pieces(page: Page) -> None:
    async with running_gateway(api_keys=("acme:secret",)) as harness:
        asking = await generate(page, harness, harness.url, key="secret")
        request = await taken(harness)
        assert request.message.tenant == "acme"
        await request.say("Hel")
        await request.say("lo")
        await request.finish()
        answer = await asking
        assert (answer["text"], "".join(answer["pieces"])) == ("Hello", "Hello")
        await harness.nothing_is_left()


async def test_example_goes_on_after_every_loss_with_every_character_once(page: Page) -> None:
    async with running_gateway() as harness, CuttingProxy(harness.url) as one, CuttingProxy(harness.url) as other:
        asking = await generate(page, harness, one.address, other.address)
        request = await taken(harness)
        harness.fake.keep(request)
        expected = ""
        for number in range(8):
            for moment in ("before", "while", "after"):
                if moment == "while":
                    one.cut()
                    other.cut()
                piece = f"{number} {moment} 😀é漢 "
                expected += piece
                await request.say(piece)
                if moment != "while":
                    await page.wait_for_function("(text) => pieces.join('') === text", arg=expected)
        await request.finish()
        answer = await asking
        assert answer.get("error") is None
        assert (answer["text"], "".join(answer["pieces"])) == (expected, expected)
        assert one.num_connections > 1
        assert other.num_connections > 1
        assert harness.fake.cancellations.empty()


async def test_example_leaves_a_gateway_that_froze_and_not_one_that_has_nothing_to_say(page: Page) -> None:
    while not await leaves_only_what_froze(page):
        pass  # the gateway is in this process: if that stood still, leaving it was right


async def leaves_only_what_froze(page: Page) -> bool:
    """Whether that could be shown: not if this process stood still. Fails if it is not so."""
    async with running_gateway() as harness, CuttingProxy(harness.url) as one, CuttingProxy(harness.url) as other:
        asking = await generate(page, harness, one.address, other.address)
        request = await taken(harness)
        harness.fake.keep(request)
        await request.say("Hel")
        await page.wait_for_function("pieces.join('') === 'Hel'")
        async with Standstills() as standstills:
            await page.wait_for_timeout(4000)  # five times as long as it waits before it asks
            if not standstills.total_s:
                assert (one.num_connections, other.num_connections) == (1, 0)
            one.freeze()
            await request.say("lo")
            await page.wait_for_function("pieces.join('') === 'Hello'")
            await request.finish()
            assert (await asking)["text"] == "Hello"
        if not standstills.total_s:
            assert other.num_connections == 1
        assert harness.fake.cancellations.empty()
    return not standstills.total_s


async def test_example_tries_again_when_it_is_told_to_and_gives_up_when_it_is_not(page: Page) -> None:
    async with running_gateway() as harness:
        asking = await generate(page, harness, harness.url)
        request = await harness.fake.next_request()
        await request.refuse(ErrorInfo.of(Overloaded("Later.", retry_after_s=0.1)))
        request = await harness.fake.next_request()
        await request.refuse(ErrorInfo.of(InvalidRequest("Never.")))
        assert (await asking)["error"] == "Never."

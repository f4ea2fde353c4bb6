"""The live page in a real browser: keyboard, phone, dark, keys, accessibility, memory. Skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.harness import Running, serving, tiny_factory, wait_until

from carousel.page import demo as demonstration

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

BROWSER = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (CHROMIUM names one)")

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--js-flags=--expose-gc"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tiny() -> Iterator[Running]:
    """The real engine on the tiny model, slow enough to be watched."""
    with serving(lambda keep: tiny_factory(keep, step_s=0.004), demo=True) as running:
        yield running


@pytest.fixture
def visit(chromium: Any) -> Iterator[Open]:
    """Open a page; at the end nothing may have gone wrong in it, and it may have asked nobody but its server."""
    contexts, faults = [], []

    def open_page(running: Running, *, live: bool = True, **options: Any) -> Any:
        context = chromium.new_context(viewport=DESK, **options) if "viewport" not in options else None
        context = context or chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)

        def failed(message: Any) -> None:
            # The browser itself reports an answer of 401 or 503 as an error.
            if message.type == "error" and "Failed to load resource" not in message.text:
                faults.append(message.text)

        page.on("console", failed)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(running.url) else faults.append(request.url))
        page.goto(running.url)
        if live:
            page.wait_for_selector("#status[data-state=live]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def ask(running: Running, number: int = 1, tokens: int = 40, **headers: str) -> None:
    body = {"model": "tiny", "prompt": [[65 + i] * 40 for i in range(number)], "max_tokens": tokens, "ignore_eos": True}
    httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=30).raise_for_status()


def rows(page: Any) -> list[str]:
    return page.locator("#rows tr").all_inner_texts()


def test_the_empty_page_explains_itself(tiny: Running, visit: Open) -> None:
    page = visit(tiny)
    page.wait_for_selector("#empty", state="visible")
    assert "The batch is empty" in page.inner_text("#empty")
    assert page.inner_text("#queue-empty") == "Nobody waits."
    assert page.title() == "tiny · Carousel"
    page.wait_for_selector("#f-slots >> text=of 8 slots")
    page.wait_for_selector('#lanes[aria-label$="0 of 8 are taken"]')


def test_a_request_can_be_followed_with_the_keyboard_alone(tiny: Running, visit: Open) -> None:
    page = visit(tiny)
    ask(tiny)
    page.wait_for_selector("#rows tr.gone")
    cells = page.locator("#rows tr").first.locator("th, td").all_inner_texts()
    assert [cells[2], cells[3], cells[5]] == ["■ length reached", "40", "40"]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('link')"):
            break
    opener = page.evaluate("document.activeElement.dataset.order")
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail[open]")
    events = page.locator("#detail-events li").all_inner_texts()
    assert "arrives with 40 tokens" in events[0]
    assert any("prompt tokens computed" in event for event in events)
    assert "steps off: length reached, 40 tokens" in events[-1]
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail[open]", state="hidden")
    assert page.evaluate("document.activeElement.dataset.order") == opener, "the focus comes back"


def test_a_click_on_a_row_of_the_batch_opens_the_request(tiny: Running, visit: Open) -> None:
    page = visit(tiny)
    ask(tiny, tokens=60)
    page.wait_for_selector("#rows tr.gone")
    place = page.evaluate_handle(
        """async () => {
            const { lanes } = await import('/page/main.js');
            await new Promise((resolve) => setTimeout(resolve, 600));
            const box = document.getElementById('lanes').getBoundingClientRect();
            const hit = lanes.hits.at(-1);
            return [box.left + hit.x + hit.w / 2, box.top + hit.y + hit.h / 2];
        }"""
    ).json_value()
    page.mouse.click(*place)
    page.wait_for_selector("#detail[open]")


def test_the_queue_says_why_each_waits(tiny: Running, visit: Open) -> None:
    page = visit(tiny)
    refused = httpx.post(f"{tiny.url}/v1/completions", json={"model": "tiny", "prompt": [65] * 200, "max_tokens": 400})
    assert refused.status_code == 400
    page.wait_for_selector("#refused >> text=Refused since the start: too long 1")
    tiny.engine.runner.step_s = 0.05
    try:
        with httpx.Client() as client:
            body = {"model": "tiny", "prompt": [[65 + i] * 20 for i in range(14)], "max_tokens": 60, "stream": True}
            with client.stream("POST", f"{tiny.url}/v1/completions", json={**body, "ignore_eos": True}):
                page.wait_for_selector("#queue li >> text=no slot free")
                waiting = page.locator("#queue li").count()
                assert 1 <= waiting <= 6
                assert page.inner_text("#f-waiting") != "0"
                assert "no slot free" in page.inner_text("#f-why")
        wait_until(lambda: not tiny.engine.stats().live)
    finally:
        tiny.engine.runner.step_s = 0.004


def test_the_chat_box_streams_an_answer(tiny: Running, visit: Open) -> None:
    page = visit(tiny)
    page.fill("#chat-max", "12")
    page.fill("#chat-text", "Hello?")
    page.press("#chat-text", "Enter")
    page.wait_for_selector("#chat-log .theirs small")
    assert "first words after" in page.inner_text("#chat-log .theirs small")
    assert page.inner_text("#chat-log .mine") == "Hello?"


def test_the_comparison_shows_both_ways_side_by_side(
    tiny: Running, visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstration, "ARRIVALS_S", 0.2)
    monkeypatch.setattr(demonstration, "NUM_REQUESTS", 10)
    page = visit(tiny)
    page.click("#demo-compare")
    page.wait_for_selector("#demo-stop", state="visible")
    assert page.is_disabled("#demo-load")
    page.wait_for_selector("#demo-table tbody tr:nth-child(4) td:nth-child(3) .bar", timeout=60_000)
    page.wait_for_selector("#demo-stop", state="hidden")
    cells = page.locator("#demo-table td").all_inner_texts()
    assert not [cell for cell in cells if "–" in cell]
    assert page.is_checked("input[value=continuous]")
    page.click("label:has(input[value=static])")
    page.wait_for_selector("#mode >> text=static batches")
    page.click("label:has(input[value=continuous])")
    page.wait_for_selector("#mode >> text=continuous batching")


def test_the_key_is_asked_for_and_stays_in_the_page(tmp_path: Path, visit: Open) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-key-1\n")
    with serving(api_keys=str(keys)) as running:
        page = visit(running, live=False)
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-input", "wrong-key-1")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-dialog[open] >> text=does not take this key")
        page.fill("#key-input", "secret-key-1")
        page.keyboard.press("Enter")
        page.wait_for_selector("#status[data-state=live]")
        stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert "secret" not in page.evaluate(stored)
        page.click("#key-button")
        page.fill("#key-input", "secret-key-1")
        page.check("#key-keep")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-dialog[open]", state="hidden")
        assert page.evaluate("sessionStorage.getItem('carousel-key')") == "secret-key-1"
        assert "secret" not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie")
        page.reload()
        page.wait_for_selector("#status[data-state=live]")


def test_it_says_when_the_server_is_gone(visit: Open) -> None:
    with serving() as running:
        page = visit(running)
        running.stop()
        page.wait_for_selector("#status[data-state=lost]")
        assert page.is_visible("#notice")


# ---- everybody


@pytest.mark.parametrize(
    ("look", "options"),
    [
        ("desk", {"color_scheme": "light"}),
        ("dark", {"color_scheme": "dark"}),
        ("phone", {"viewport": PHONE, "has_touch": True, "is_mobile": True, "reduced_motion": "reduce"}),
    ],
)
def test_axe_finds_no_serious_fault(tiny: Running, visit: Open, look: str, options: dict[str, Any]) -> None:
    page = visit(tiny, **options)
    ask(tiny, 10, 30)
    page.wait_for_selector("#rows tr.gone")
    judged = [axe.Axe().run(page)]
    page.locator("#rows button").first.click()
    page.wait_for_selector("#detail[open]")
    judged.append(axe.Axe().run(page))
    page.click("#detail-close")
    page.evaluate("document.getElementById('key-dialog').showModal()")
    judged.append(axe.Axe().run(page))
    serious = [
        (fault["id"], node["target"], node.get("failureSummary"))
        for result in judged
        for fault in result.response["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
    assert serious == []
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, "the page scrolls sideways"
    assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if "dark" in look else "light")


EIGHT_HOURS = """async (hours) => {
    const { draw, store, tables } = await import('/page/main.js');
    let order = 1e6, live = [], sizes = [];
    const ticks = hours * 3600 * 4;
    const now = { out: 100, prompt: 50, step: [0.01, 0.02], itl: [0.01, 0.02], ttft: [0.1, 0.2] };
    const kv = { cells: 'us.c'.repeat(100), per: 1, all: 400, used: 200, shared: 100, cached: 100, free: 100 };
    for (let tick = 0; tick < ticks; tick += 1) {
        const t = 1e5 + tick / 4, ev = [];
        for (const one of live.filter((one) => one.until <= tick)) ev.push(['e', t, one.order, 30, 'length', false]);
        live = live.filter((one) => one.until > tick);
        if (live.length < 8) {
            const one = { order: order += 1, until: tick + 4 + (order * 7) % 29, lane: 0, since: t };
            while (live.some((other) => other.lane === one.lane)) one.lane += 1;
            live.push(one);
            ev.push(['a', t, one.order, 'cmpl-' + one.order, 0, 'tenant-' + one.order % 5, 100, 64],
                ['s', t, one.order, one.lane, 16, 84], ['c', t + 0.1, one.order, t, 84, 0], ['f', t + 0.1, one.order]);
        }
        const run = live.map((one) => [one.order, 'cmpl-' + one.order, 0, 'tenant-' + one.order % 5, 100, 16, 120, 20,
            64, 9, 0, one.since, one.since, one.since, 1, one.lane, null, [[one.lane * 9, 9]]]);
        const steps = [0, 1, 2, 3].map((i) => [tick * 4 + i, t + i / 16, 50, 20, 8, 0, 0, 8, 2]);
        store.take({ k: 'tick', t, gap: false, ev, steps, run, wait: [], running: run.length, waiting: 0,
            static: false, kv, now });
        if (tick % 480 === 0) { tables(); draw(); }
        if ((tick + 1) % (ticks / 8) === 0) {
            await new Promise((resolve) => setTimeout(resolve));
            gc();
            sizes.push([performance.memory.usedJSHeapSize, document.getElementsByTagName('*').length,
                store.sequences.size, store.steps.length]);
        }
    }
    return sizes;
}"""


def test_eight_hours_of_events_leave_memory_flat(tiny: Running, visit: Open) -> None:
    page = visit(tiny)
    page.route("**/page/events", lambda route: route.abort())
    page.reload()
    page.wait_for_selector("#status[data-state=lost]")
    page.evaluate(
        """async (hello) => (await import('/page/main.js')).store.take(hello)""",
        {"k": "hello", "model": "tiny", "slots": 8, "target_ms": 0, "policy": "fcfs", "block_tokens": 16, "steps": []},
    )
    sizes = page.evaluate(EIGHT_HOURS, 8)
    heap, nodes, sequences, steps = zip(*sizes, strict=True)
    assert max(heap[2:]) - min(heap[2:]) < 3 * 2**20, heap
    assert max(nodes) < 1500
    assert max(sequences) < 600
    assert max(steps) <= 4000

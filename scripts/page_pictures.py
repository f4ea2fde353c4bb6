"""Pictures of the live page under load, for docs/: desk, dark and phone, with the demo model on a server of its own.

    .venv/bin/python scripts/page_pictures.py --out docs

Needs a Chromium: the one on the PATH, or what CHROMIUM names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from soak.server import Server

_TEXT = "You are a helpful assistant of a fairground. Answer in short and friendly sentences, and say what you know. "
_QUESTIONS = ("What is a carousel?", "Why do horses go up and down?", "Tell me a story.", "Who invented the swing?")


def _ask(url: str, number: int, seconds: float) -> None:
    """One client that asks again and again, with a common beginning, for so long."""
    chance, until = random.Random(number), time.monotonic() + seconds
    while time.monotonic() < until:
        long = chance.random() < 0.3
        prompt = _TEXT * (6 if long else 2) + _QUESTIONS[number % 4]
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": chance.randint(10, 90), "ignore_eos": True}
        headers = {"Content-Type": "application/json", "x-carousel-tenant": ("shop", "school", "clinic")[number % 3]}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=120).read()
        except urllib.error.URLError:
            return
        time.sleep(chance.random() * 2)


def _pictures(browser: Any, url: str, out: Path) -> None:
    looks: dict[str, dict[str, Any]] = {
        "page-desk": {"viewport": {"width": 1360, "height": 1000}, "color_scheme": "light"},
        "page-dark": {"viewport": {"width": 1360, "height": 1000}, "color_scheme": "dark"},
        "page-phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
    }
    pages = {}
    for name, options in looks.items():
        pages[name] = browser.new_context(**options).new_page()
        pages[name].goto(url)
        pages[name].wait_for_selector("#status[data-state=live]")
    clients = [threading.Thread(target=_ask, args=(url, number, 45.0), daemon=True) for number in range(11)]
    for client in clients:
        client.start()
    pages["page-desk"].wait_for_timeout(24_000)
    for name, page in pages.items():
        page.bring_to_front()
        page.wait_for_timeout(1500)
        page.screenshot(path=out / f"{name}.png")
    detail = pages["page-desk"]
    detail.bring_to_front()
    detail.locator("#rows tr:not(.gone) button").first.click()
    detail.wait_for_timeout(1000)
    detail.screenshot(path=out / "page-request.png")
    detail.click("#detail-close")
    for client in clients:
        client.join()
    detail.click("#demo-compare")
    detail.wait_for_selector("#demo-table tbody tr:nth-child(4) td:nth-child(3) .bar", timeout=300_000)
    detail.wait_for_timeout(1500)
    detail.screenshot(path=out / "page-compare.png")


def _shrink(file: Path) -> None:
    """256 colours are enough for a page like this, and a quarter of the size."""
    from PIL import Image

    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the pictures (default docs)")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        print("no Chromium here: install one, or name it in CHROMIUM", file=sys.stderr)
        return 1
    flags = [
        "--max-batch-sequences",
        "8",
        "--kv-cache-memory",
        "400MiB",
        "--demo",
        "--log-level",
        "warning",
        "--trust-tenant-header",
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "server.log").open("wb") as log,
        Server(flags, log) as server,
        sync_playwright() as driver,
    ):
        server.wait_ready()
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        _pictures(browser, server.url, options.out)
        browser.close()
    for file in options.out.glob("page-*.png"):
        _shrink(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

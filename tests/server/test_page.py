"""The live page as browsers and other clients meet it over HTTP: its files, its headers, who may see what."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.harness import Running, serving, wait_until

from carousel.config import Settings
from carousel.page import assets, hub
from carousel.page import demo as demonstration

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
ASK = {"prompt": [65] * 40, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def page() -> Iterator[Running]:
    with serving(demo=True) as running:
        yield running


def messages(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def watch(url: str, until: Any, **headers: str) -> list[dict[str, Any]]:
    """The messages up to the first for which ``until`` is true."""
    seen = []
    with httpx.stream("GET", f"{url}/page/events", headers=headers, timeout=20) as response:
        assert response.status_code == 200, response.read()
        for message in messages(response):
            seen.append(message)
            if until(message):
                return seen
    raise AssertionError(f"the stream ended: {seen[-1:]}")


# ---- the files


def test_browsers_get_the_page_and_everybody_else_what_kserve_says(page: Running) -> None:
    shown = httpx.get(page.url, headers=BROWSER)
    assert shown.status_code == 200
    assert shown.headers["content-type"].startswith("text/html")
    for headers in ({}, {"Accept": "application/json"}):
        assert httpx.get(page.url, headers=headers).json() == {"status": "alive"}
    assert shown.headers["vary"] == "Accept"


def test_the_page_loads_nothing_from_elsewhere_and_every_file_it_names_is_there(page: Running) -> None:
    names, seen = ["index.html"], set()
    while names:
        name = names.pop()
        answer = httpx.get(page.url if name == "index.html" else f"{page.url}/page/{name}", headers=BROWSER)
        assert answer.status_code == 200, name
        seen.add(name)
        assert answer.headers["content-security-policy"] == assets.POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), name
        found = re.findall(r"""(?:src|href)="page/([^"]+)"|from "\./([^"]+)"|url\("?([^")]+)""", answer.text)
        names += [name for match in found for name in match if name and name not in seen]
    assert seen == set(assets.load())
    for word in ("default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"):
        assert word in assets.POLICY
    html = assets.load()["index.html"].body.decode()
    assert not re.search(r"<script(?! type=\"module\" src=)|<style|\son\w+=|\sstyle=", html), "the policy forbids it"


def test_a_file_that_has_not_changed_is_not_sent_again(page: Running) -> None:
    first = httpx.get(f"{page.url}/page/main.js")
    again = httpx.get(f"{page.url}/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2fboard.py", "%2e%2e/__init__.py", "index"])
def test_nothing_else_is_served(page: Running, name: str) -> None:
    assert httpx.get(f"{page.url}/page/{name}").status_code == 404


# ---- the events


def test_a_viewer_sees_a_request_step_on_and_off(page: Running) -> None:
    asked = threading.Timer(0.5, lambda: httpx.post(f"{page.url}/v1/completions", json={"model": "tiny", **ASK}))
    asked.start()
    seen = watch(page.url, lambda m: any(event[0] == "e" for event in m.get("ev", ())))
    hello, ticks = seen[0], seen[1:]
    assert (hello["k"], hello["model"], hello["slots"]) == ("hello", "tiny", 8)
    events = [event for message in ticks for event in message["ev"]]
    assert [event[0] for event in events] == ["a", "s", "c", "f", "e"]
    assert (events[0][6], events[4][3], events[4][4]) == (40, 6, "length")
    steps = [step for message in ticks for step in message["steps"]]
    assert sum(step[3] for step in steps) == 40
    assert "A" * 8 not in json.dumps(seen), "text has no place on the page"
    asked.join()


def test_nobody_is_watched_when_the_last_viewer_has_gone(page: Running) -> None:
    watch(page.url, lambda message: message["k"] == "tick")
    wait_until(lambda: not page.engine.timeline.watchers)


def test_no_more_than_so_many_viewers(page: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_VIEWERS", 1)
    with httpx.stream("GET", f"{page.url}/page/events", timeout=20) as first:
        stays = messages(first)
        assert next(stays)["k"] == "hello"
        second = httpx.get(f"{page.url}/page/events", timeout=5)
    assert second.status_code == 429
    assert second.headers["retry-after"] == "10"
    assert "1 live pages are open" in second.text
    stays.close()
    wait_until(lambda: not page.engine.timeline.watchers)


# ---- who may see it


def test_keys_guard_the_events_and_a_tenants_key_shows_no_other_tenants_names(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("operator-key\nred-key-1=red\nblue-key-1=blue\n")
    with serving(api_keys=str(keys)) as running:
        assert httpx.get(running.url, headers=BROWSER).status_code == 200
        assert httpx.get(f"{running.url}/page/main.js").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong-key"}):
            assert httpx.get(f"{running.url}/page/events", headers=headers).status_code == 401
        assert httpx.post(f"{running.url}/page/demo", json={"do": "load"}).status_code == 401

        def ask() -> None:
            headers = {"Authorization": "Bearer red-key-1", "x-request-id": "reds-request"}
            httpx.post(f"{running.url}/v1/completions", json={"model": "tiny", **ASK}, headers=headers)

        shown = {}
        for key in ("operator-key", "red-key-1", "blue-key-1"):
            timer = threading.Timer(0.5, ask)
            timer.start()
            done = lambda m: any(event[0] == "e" for event in m.get("ev", ()))  # noqa: E731
            seen = watch(running.url, done, Authorization=f"Bearer {key}")
            arrived = next(event for m in seen for event in m.get("ev", ()) if event[0] == "a")
            shown[key] = (bool(arrived[3]), arrived[5], arrived[6], '"red"' in json.dumps(seen))
            timer.join()
        assert shown["operator-key"] == (True, "red", 40, True)
        assert shown["red-key-1"] == (True, "red", 40, True)
        assert shown["blue-key-1"] == (False, "", 40, False)


def test_the_page_is_there_where_only_this_machine_or_a_key_reaches_it(tmp_path: Path) -> None:
    keys = str(tmp_path)
    for changes, shown in (
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "0.0.0.0", "api_keys": keys}, True),
        ({"host": "0.0.0.0", "service_account_audience": "carousel"}, True),
        ({"host": "0.0.0.0", "page": "always"}, True),
        ({"page": "never"}, False),
    ):
        assert Settings(**changes).shows_page is shown, changes


def test_switched_off_there_is_no_trace_of_it() -> None:
    with serving(page="never", demo=True) as running:
        assert httpx.get(running.url, headers=BROWSER).json() == {"status": "alive"}
        for path in ("/page/events", "/page/main.js", "/page/index.html"):
            assert httpx.get(running.url + path).status_code == 404


def test_a_viewer_does_not_hold_the_server_up() -> None:
    with serving() as running, httpx.stream("GET", f"{running.url}/page/events", timeout=20) as response:
        stream = messages(response)
        assert next(stream)["k"] == "hello"
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        assert [m["k"] for m in stream][-1] == "bye"
        stopping.join(5)
        assert not stopping.is_alive()
        assert running.codes == [0]


# ---- the demonstration


def act(page: Running, what: object, **options: Any) -> httpx.Response:
    return httpx.post(f"{page.url}/page/demo", json={"do": what}, **options)


def test_the_comparison_runs_both_ways_and_puts_the_batching_back(
    page: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstration, "ARRIVALS_S", 0.2)
    monkeypatch.setattr(demonstration, "NUM_REQUESTS", 10)
    assert act(page, "compare").status_code == 200
    assert act(page, "load").status_code == 400
    demo = page.servers[0].page.demo
    wait_until(lambda: len(demo.results) == 2 and not demo.running, 60)
    assert demo.problem == ""
    static, continuous = demo.results["static"], demo.results["continuous"]
    assert static["tokens"] == continuous["tokens"] > 0
    wait_until(lambda: page.engine.core.scheduler.limits.static is False)


def test_the_batching_is_switched_and_the_load_stopped(page: Running) -> None:
    demo = page.servers[0].page.demo
    for what, static in (("static", True), ("continuous", False)):
        assert act(page, what).status_code == 200
        wait_until(lambda static=static: page.engine.core.scheduler.limits.static is static)
    act(page, "load")
    wait_until(lambda: page.engine.stats().live)
    act(page, "stop")
    wait_until(lambda: not page.engine.stats().live and not demo.running)


@pytest.mark.parametrize(
    ("body", "said"), [({"do": "everything"}, "load or compare"), ({}, "load or compare"), ([], "load or compare")]
)
def test_what_the_demonstration_does_not_know(page: Running, body: object, said: str) -> None:
    answer = httpx.post(f"{page.url}/page/demo", json=body)
    assert answer.status_code == 400
    assert said in answer.text


def test_another_site_cannot_start_it_behind_a_users_back(page: Running) -> None:
    """Browsers send a form or plain text to other sites without asking; JSON only after a preflight, which fails."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = httpx.post(f"{page.url}/page/demo", content=b'{"do": "load"}', headers={"Content-Type": kind})
        assert answer.status_code in (400, 415)
    preflight = httpx.options(f"{page.url}/page/demo", headers={"Origin": "http://elsewhere.example"})
    assert "access-control-allow-origin" not in preflight.headers


def test_without_the_setting_there_is_no_demonstration() -> None:
    with serving() as running:
        answer = act(running, "load")
        assert answer.status_code == 403
        assert "--demo" in answer.text


# ---- quotas


def test_what_quotas_refused_is_counted(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: {requests_per_minute: 1}\n")
    with serving(tenant_policy=str(policy)) as running:
        for status in (200, 429, 429):
            assert httpx.post(f"{running.url}/v1/completions", json={"model": "tiny", **ASK}).status_code == status
        seen = watch(running.url, lambda message: message["k"] == "tick")
        assert seen[-1]["quotas"] == {"requests": 2}

"""The page at `/`: what it may load, what its stream says, and a browser that uses it."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quire
from program import ROOT
from quire._description import HeldBlock, HeldSequence, WaitingRequest
from quire.serve import page_routes
from quire.serve.held_kv import HeldKV
from quire.serve.page_routes import PAGE_FILES
from quire.serve.tenants import Tenant, Tenants
from server_process import DEADLINE, Server, events, running
from tiny_model import TinyModel

FOLDER = ROOT / "python" / "quire" / "serve" / "page"
HTML, STYLE, SCRIPT = ((FOLDER / name).read_text() for name in PAGE_FILES.values())
ANN, BOB = "ann-key-0123456789", "bob-key-0123456789"


# ---- Files


def test_the_files_may_load_nothing_but_each_other(server: Server) -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(PAGE_FILES.values())
    for path, name in PAGE_FILES.items():
        status, headers, content = server.request("GET", path)
        assert status == 200 and content == (FOLDER / name).read_text()
        policy = dict(
            rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert {policy[rule] for rule in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_nothing_is_inline_and_no_text_becomes_html() -> None:
    assert set(re.findall(r'(?:src|href)="([^"]*)"', HTML)) == {"page.css", "page.js"}
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|javascript:|https?:", HTML)
    assert not re.search(r"url\(|@import|https?:", STYLE)
    forbidden = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|https?:"
    assert not re.search(forbidden, SCRIPT)
    named = set(re.findall(r'\b(?:at|rows)\("([^"]+)"', SCRIPT))
    assert named <= set(re.findall(r'\bid="([^"]+)"', HTML))


def test_the_script_names_what_the_stream_has(server: Server) -> None:
    connection, answer = open_states(server)
    state = next(events(answer))
    connection.close()
    assert set(re.findall(r"\bstats\.(\w+)", SCRIPT)) <= state["stats"].keys()
    assert set(re.findall(r'\bper\("(\w+)"\)', SCRIPT)) <= state["stats"].keys()
    assert set(re.findall(r'\bmean\("(\w+)"\)', SCRIPT)) == state["latency"].keys()
    fields = set(re.findall(r"\bstate\.(\w+)", SCRIPT)) - {"stats"}
    assert fields <= state.keys()
    assert set(re.findall(r"\btier\.(\w+)", SCRIPT)) <= state["tiers"][0].keys()
    assert set(re.findall(r"\bkv\.(\w+)", SCRIPT)) <= state["kv"].keys()
    for name, kind in (
        ("block", HeldBlock),
        ("sequence", HeldSequence),
        ("request", WaitingRequest),
    ):
        named = set(re.findall(rf"\b{name}\.(\w+)", SCRIPT))
        assert named and named <= {field.name for field in dataclasses.fields(kind)}


# ---- The stream


def open_states(
    server: Server, key: str | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    connection.request("GET", "/page/state", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    return connection, answer


def test_the_stream_follows_what_happens(server: Server) -> None:
    connection, answer = open_states(server)
    stream = events(answer)
    before = next(stream)
    server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True})

    def grown_in(after: dict[str, Any]) -> dict[str, int]:
        counts = {
            name: after["latency"][name]["count"] - before["latency"][name]["count"]
            for name in after["latency"]
        }
        made = after["stats"]["completion_tokens"] - before["stats"]["completion_tokens"]
        return {"completion_tokens": made, **counts}

    after = next(stream)
    while min(grown_in(after).values()) == 0 or sum(grown_in(after).values()) < 4 + 1 + 3:
        after = next(stream)  # one in the middle of the answer
    assert grown_in(after) == {"completion_tokens": 4, "first_token": 1, "between_tokens": 3}
    assert after["time"] - before["time"] > 0.4 and after["model"] == "tiny"
    assert [tier["name"] for tier in after["tiers"]] == ["memory"]
    answer.close()
    connection.close()


def test_a_head_of_the_stream_leaves_the_connection_free(server: Server) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
    for method, path in (("HEAD", "/page/state"), ("GET", "/version")):
        connection.request(method, path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    connection.close()


def test_the_stream_needs_a_key_and_tells_nothing_of_others(keyed: Server) -> None:
    assert keyed.request("GET", "/page/state", authorization="none")[0] == 401
    keyed.post("/v1/completions", {"prompt": "a secret of ann", "max_tokens": 1})
    connection, answer = open_states(keyed, "bob-key-0123456789")
    text = json.dumps(next(events(answer)))
    connection.close()
    assert "secret" not in text and "ann" not in text


def kv_of(
    server: Server, key: str | None, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """What a key is shown of KV, once it is as expected."""
    connection, answer = open_states(server, key)
    for state in events(answer):
        if holds(state["kv"]):
            break
    answer.close()
    connection.close()
    return state["kv"]  # type: ignore[no-any-return]


def ends_of(kv: dict[str, Any]) -> list[int]:
    """Where the blocks end that nothing goes on from."""
    inner = {block["parent"] for block in kv["blocks"]}
    return sorted(block["end"] for i, block in enumerate(kv["blocks"]) if i not in inner)


def test_each_key_sees_the_blocks_that_are_its_own(tiny: TinyModel, keys_file: Path) -> None:
    options = ("--api-keys", str(keys_file), "--page-size", "16")
    with running(tiny.directory, *options, key=ANN) as server:

        def ask(key: str, prompt: list[int], **fields: Any) -> None:
            body = {"prompt": prompt, "max_tokens": 0, **fields}
            server.post("/v1/completions", body, authorization=f"Bearer {key}")

        begin = list(range(5, 45))
        ask(ANN, [*begin, 50, 51, 52])
        ask(ANN, [*begin, 60])
        ask(ANN, [*begin, 70, 71], cache_salt="mine")
        ask(BOB, [*begin, 80, 81, 82, 83, 84])
        of_ann = kv_of(server, ANN, lambda kv: len(kv["sequences"]) == 3)
        of_bob = kv_of(server, BOB, lambda kv: len(kv["sequences"]) == 1)
    assert len(of_ann["blocks"]) == 4 and ends_of(of_ann) == [41, 42, 43]
    root = of_ann["blocks"][0]
    shared = [block for block in of_ann["blocks"] if block["sequences"] == 2]
    assert [(block["begin"], block["end"]) for block in shared] == [(0, 40)] and root["begin"] == 0
    assert len({block["salt_digest"] for block in of_ann["blocks"]}) == 2
    assert ends_of(of_bob) == [45] and of_bob["blocks"][0]["sequences"] == 1
    assert of_bob["blocks"][0]["parent"] is None and of_bob["sequences"][0]["block"] == 0
    mine = {block["salt_digest"] for block in of_ann["blocks"]}
    assert of_bob["blocks"][0]["salt_digest"] not in mine


def test_a_state_is_made_once_for_all_pages_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page of 256 had a thousand blocks written as JSON twice a second: more than the event
    loop has time for."""
    made: list[Any] = []
    monkeypatch.setattr(page_routes, "_state_of", lambda *given: made.append(given) or {})
    nothing: dict[str, Any] = {"blocks": [], "sequences": [], "waiting": [], "cut": False}
    description = SimpleNamespace(**nothing, salt_digest=lambda salt: "")
    engine: Any = SimpleNamespace(describe=lambda: description)
    service: Any = SimpleNamespace(held_kv=HeldKV(engine, Tenants()), draining=False)
    ann, bob = Tenant("ann"), Tenant("bob")

    async def run() -> None:
        for _ in range(5):
            page_routes._event_of(service, ann)
        assert len(made) == 1
        page_routes._event_of(service, bob)
        service.draining = True  # which all are told at once
        page_routes._event_of(service, ann)
        assert len(made) == 3
        service.held_kv._read_at = -float("inf")  # half a second later
        page_routes._event_of(service, ann)
        assert len(made) == 4 and len(service.held_kv.events) == 1

    asyncio.run(run())


def test_where_there_are_no_keys_all_is_shown(tiny: TinyModel) -> None:
    with running(tiny.directory, "--page-size", "16") as server:
        for salt in ("one", "two"):
            body = {"prompt": [5, 6, 7], "max_tokens": 0, "cache_salt": salt}
            server.post("/v1/completions", body)
        kv = kv_of(server, None, lambda kv: len(kv["blocks"]) == 2)
    assert len({block["salt_digest"] for block in kv["blocks"]} - {"one", "two"}) == 2


def test_the_stream_ends_with_the_server(tiny: TinyModel) -> None:
    with running(tiny.directory, "--page-size", "16") as server:
        connection, answer = open_states(server)
        stream = events(answer)
        assert next(stream)["draining"] is False
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1]["draining"] is True
        connection.close()
        assert server.process.wait(DEADLINE) == 0


# ---- A browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's, through playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        # Its sandbox needs privileges that containers do not give.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(DEADLINE * 1000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if "Content Sec" in said.text else None)
    yield page
    context.close()
    assert errors == []


def test_a_browser_chats(page: Any, server: Server, engine: quire.Engine) -> None:
    first = [{"role": "user", "content": "What is <b>a quire</b>?"}]
    expected = engine.generate(first)
    page.goto(server.url + "/")
    page.get_by_text("ready", exact=True).wait_for()
    page.fill("#question", first[0]["content"])
    page.press("#question", "Enter")
    page.get_by_text("tokens of prompt").wait_for()
    said = page.locator("#messages li")
    assert said.all_text_contents() == [first[0]["content"], expected.text]
    assert page.locator("#messages b").count() == 0  # a text, and no HTML
    assert f"{len(expected.ids)} of answer" in page.text_content("#usage")
    page.locator("#between", has_text=re.compile(r" ms$")).wait_for()
    text = page.text_content("#pages-text")
    assert re.fullmatch(r"\d+ of \d+ hold answers in work, \d+ are kept .*", text), text
    page.click("#clear")
    assert said.count() == 0


def test_a_browser_shows_who_holds_kv(page: Any, tiny: TinyModel) -> None:
    begin = list(range(5, 45))
    with running(tiny.directory, "--page-size", "16") as server:
        for end in ([50, 51, 52], [60]):
            server.post("/v1/completions", {"prompt": [*begin, *end], "max_tokens": 0})
        page.goto(server.url + "/")
        page.get_by_text("3 blocks, 2 samples and kept texts").wait_for()
        texts = page.locator("#blocks li").all_text_contents()
        assert len(texts) == 3 and "kept" not in texts[0], texts
        assert texts[0].startswith("tokens 0 to 40: ") and texts[0].endswith("; seen by 2")
        for text in texts[1:]:
            assert re.fullmatch(r"tokens 40 to 4[13]: .*; seen by one; kept for later prompts", text)
        margins = page.eval_on_selector_all(
            "#blocks li", "items => items.map(item => item.style.marginInlineStart)"
        )
        assert margins == ["0rem", "1rem", "1rem"]
        assert page.locator("#blocks li.shared").count() == 1
        page.locator("#step-times tr").first.wait_for()
        assert re.fullmatch(r"[0-9.]+ ms", page.text_content("#step"))


@pytest.mark.parametrize("button", ["stop", "clear"])
def test_a_browser_stops_an_answer(page: Any, tiny: TinyModel, button: str) -> None:
    # A browser that is slow to read is no reason here to end the answer.
    options = ("--no-prefix-cache", "--page-size", "16", "--limit", "unread_bytes=1G")
    with running(tiny.directory, *options) as server:
        stop_an_answer(page, server, button)


def stop_an_answer(page: Any, server: Server, button: str) -> None:
    page.goto(server.url + "/")
    # Some seconds of work; stopped as soon as there is text, before the browser falls behind.
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps(
                {**json.loads(route.request.post_data), "window": 32, "max_tokens": 20_000}
                | {"ignore_eos": True}
            )
        ),
    )
    page.evaluate(
        """(button) => new MutationObserver(() => {
          const stop = document.getElementById("stop");
          const text = document.querySelector("#messages li.assistant:not(:empty)");
          if (text && !stop.hidden) {
            document.body.dataset.stopped = "";
            document.getElementById(button).click();
          }
        }).observe(document.getElementById("messages"),
                   {subtree: true, childList: true, characterData: true})""",
        button,
    )
    page.fill("#question", "Go on.")
    page.click("#send")
    page.locator("body[data-stopped]").wait_for()
    page.locator("#send:not([disabled])").wait_for()
    server.wait_metrics(lambda m: m["quire:num_requests_running"] == 0)
    assert page.locator("#messages li.error").all_text_contents() == []
    # What was cleared is in no later conversation: the rest of an answer once began the next one.
    roles = page.evaluate("() => messages.map((message) => message.role)")
    assert roles == ([] if button == "clear" else ["user", "assistant"])


def test_a_browser_is_asked_for_a_key(page: Any, keyed: Server) -> None:
    page.goto(keyed.url + "/")
    for key, ready in (("wrong-key-0123456789", False), (ANN, True)):
        page.locator("#key-form").wait_for()
        page.fill("#key", key)
        page.press("#key", "Enter")
        if ready:
            page.get_by_text("ready", exact=True).wait_for()
        else:
            page.get_by_text("The key is not valid.").wait_for()
    assert not page.locator("#key-form").is_visible()
    page.reload()  # this tab knows it
    page.get_by_text("ready", exact=True).wait_for()

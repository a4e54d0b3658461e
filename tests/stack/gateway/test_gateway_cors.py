"""Browsers at the gateway: preflights, what a page of another origin may read, and what no configuration may open."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from stack.config import BadConfig, load
from stack.gateway import GatewayConfig
from stack.gateway.cors import Cors
from tests.support.gateway_scene import ASK, CHAT, DONE, KEYS, LAST, ROLE, STREAM, TOKEN, USAGE, events, gateway, says

PAGE = "https://chat.example.com"
ASKED = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


# ---- rules


@pytest.mark.parametrize(
    ("status", "changed"),
    [
        (204, {}),
        (204, {"Access-Control-Request-Headers": ""}),
        (403, {"Origin": "https://chat.example.com.evil.org"}),
        (403, {"Origin": "null"}),
        (403, {"Origin": "http://chat.example.com"}),
        (403, {"Access-Control-Request-Method": "DELETE"}),
        (403, {"Access-Control-Request-Headers": "authorization, x-other"}),
        (403, {"Access-Control-Request-Headers": "authorization\r\nX: y"}),
    ],
)
def test_preflight_needs_exact_origin_method_headers(status: int, changed: dict[str, str]):
    """A preflight is allowed by exact origin method and headers."""
    got, headers, text = Cors(allowed_origins=(PAGE,)).preflight(ASKED | changed)
    assert status == got
    allowed = {name: value for name, value in headers.items() if name.startswith("Access-Control-Allow")}
    if status == 204:
        assert [PAGE, "GET, POST", "600"] == [
            headers[f"Access-Control-{name}"] for name in ("Allow-Origin", "Allow-Methods", "Max-Age")
        ]
        assert (ASKED | changed)["Access-Control-Request-Headers"] == headers.get("Access-Control-Allow-Headers", "")
    else:
        assert ({}, True) == (allowed, text.endswith("of the gateway\n"))
    assert "Origin" in headers["Vary"]
    assert "Access-Control-Allow-Credentials" not in headers


@pytest.mark.parametrize(
    ("word", "settings"),
    [
        ("list the origins", {"allowed_origins": ["*"], "allow_credentials": True}),
        ("keep '[*]' alone", {"allowed_origins": ["*", PAGE]}),
        ("allowed_origins is empty", {"allowed_origins": []}),
        ("without a path", {"allowed_origins": [PAGE + "/"]}),
        ("is no origin", {"allowed_origins": ["chat.example.com"]}),
        ("is no origin", {"allowed_origins": ["https://*.example.com"]}),
        ("is no origin", {"allowed_origins": ["null"]}),
        ("is no origin", {"allowed_origins": ["https://Chat.example.com"]}),
        ("allowed_methods: .* like POST", {"allowed_origins": [PAGE], "allowed_methods": ["*"]}),
        ("exposed_headers: .*X-Request-Id", {"allowed_origins": [PAGE], "exposed_headers": ["a b"]}),
        ("max_age_s .*from 0 to .*not -1", {"allowed_origins": [PAGE], "max_age_s": -1}),
    ],
)
def test_a_mistake_in_cors_is_one_sentence(tmp_path: Path, word: str, settings: dict[str, Any]):
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps({"cors": settings}))
    with pytest.raises(BadConfig, match=r"cors") as caught:
        load(path, GatewayConfig)
    assert re.search(word, str(caught.value))
    assert "\n" not in str(caught.value)


# ---- through the gateway


async def test_without_cors_no_page_of_another_origin_is_let_in(tmp_path: Path):
    """vLLM allows every origin unless it is told otherwise; its headers must not open the gateway."""
    async with gateway(
        tmp_path, says({}, **{"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Credentials": "true"})
    ) as it:
        async with it.session.options(it.started.url + CHAT, headers=ASKED) as answer:
            assert 401 == answer.status
        async with it.post(Origin=PAGE) as answer:
            assert 200 == answer.status
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        assert not {name for *_, headers, _ in it.engine.asked for name in headers if name == "origin"}


async def test_preflight_needs_no_key_and_leaves_no_record(tmp_path: Path):
    """A preflight needs no key reaches no engine and leaves no record."""
    async with gateway(tmp_path, cors=Cors(allowed_origins=(PAGE,))) as it:
        async with it.session.options(it.started.url + CHAT, headers=ASKED) as answer:
            assert (204, PAGE, b"") == (
                answer.status,
                answer.headers["Access-Control-Allow-Origin"],
                await answer.read(),
            )
        async with it.session.options(
            it.started.url + CHAT, headers=ASKED | {"Origin": "https://other.example.com"}
        ) as answer:
            assert (403, True) == (answer.status, "cors.allowed_origins" in await answer.text())
        async with it.session.options(it.started.url + CHAT, headers={"Origin": PAGE}) as answer:
            assert 401 == answer.status, "it is no preflight"
        assert [] == it.engine.asked
        assert not it.path.exists() or not it.path.read_bytes()


@pytest.mark.parametrize(("origin", "readable"), [(PAGE, True), ("https://other.example.com", False), (None, False)])
async def test_answers_are_readable_by_allowed_origin_only(tmp_path: Path, origin: str | None, readable: bool):
    """Every kind of answer is readable by an allowed origin only."""

    async def either(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        answer = (
            events(ROLE, TOKEN, LAST, USAGE, DONE)
            if b"stream" in body
            else says({}, **{"Vary": "Accept", "Access-Control-Allow-Origin": "*"})
        )
        return await answer(request)

    asked = {} if origin is None else {"Origin": origin}
    async with gateway(tmp_path, either, cors=Cors(allowed_origins=(PAGE, "http://localhost:3000"))) as it:
        statuses = []
        for given in (it.post(ASK, **asked), it.post(STREAM, **asked), it.post(b"no json", **asked),
            it.post(Authorization="Bearer wrong", **asked),
                      it.post(route="/v1/other", **asked),
                      it.session.get(it.started.url + "/v2", headers=asked)):  # fmt: skip
            async with given as answer:
                await answer.read()
                statuses.append(answer.status)
                assert [origin] * readable == answer.headers.getall("Access-Control-Allow-Origin", [])
                assert readable == (
                    "X-Request-Id, Retry-After" in answer.headers.get("Access-Control-Expose-Headers", "")
                )
                assert "Origin" in ", ".join(answer.headers.getall("Vary"))
        assert [200, 200, 400, 401, 404, 404] == statuses


async def test_credentials_are_allowed_to_named_origins_only(tmp_path: Path):
    async with gateway(tmp_path, cors=Cors(allowed_origins=(PAGE,), allow_credentials=True)) as it:
        for origin, want in ((PAGE, ["true"]), ("https://other.example.com", [])):
            async with it.post(Origin=origin) as answer:
                assert want == answer.headers.getall("Access-Control-Allow-Credentials", [])


# ---- in a real browser


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The URL of an empty page on an origin of its own."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<link rel=icon href=data:,>page")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextlib.contextmanager
def beside(tmp_path: Path, **settings: Any) -> Iterator[SimpleNamespace]:
    """A gateway in a thread of its own: the browser's client has a loop in this one."""
    loop = asyncio.new_event_loop()
    ready, over, found = threading.Event(), asyncio.Event(), SimpleNamespace()

    async def run() -> None:
        async with gateway(tmp_path, events(ROLE, *[TOKEN] * 20, LAST, USAGE, DONE, pause_s=0.05), **settings) as it:
            found.it = it
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(30)
        yield found.it
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()


FETCH = """async ([url, key, body]) => {
    try {
        const answer = await fetch(url, {method: "POST", headers: {"Authorization": `Bearer ${key}`, "Content-Type": "application/json"}, body});
        const reader = answer.body.getReader(), text = new TextDecoder();
        let pieces = 0, whole = "";
        for (let next = await reader.read(); !next.done; next = await reader.read()) {
            pieces += 1;
            whole += text.decode(next.value, {stream: true});
        }
        return {status: answer.status, id: answer.headers.get("X-Request-Id"), pieces, whole};
    } catch (error) { return {error: String(error)}; }
}"""  # noqa: E501


@pytest.mark.chromium
class TestInChromium:
    def test_a_page_of_an_allowed_origin_reads_a_stream_and_an_error(self, chromium, elsewhere, tmp_path):
        page = chromium.new_page()
        page.goto(elsewhere)
        with beside(tmp_path, cors=Cors(allowed_origins=(elsewhere,))) as it:
            read = page.evaluate(FETCH, [it.started.url + CHAT, KEYS["demo"][0], json.dumps(STREAM)])
            refused = page.evaluate(FETCH, [it.started.url + CHAT, "vw-demo-wrong", json.dumps(STREAM)])
        page.close()
        assert (200, True, True) == (read["status"], bool(read["id"]), "data: [DONE]" in read["whole"])
        assert read["pieces"] > 2, "it comes piece by piece"
        assert (401, True) == (refused["status"], "unknown_key" in refused["whole"])

    @pytest.mark.parametrize("cors", [None, Cors(allowed_origins=(PAGE,))])
    def test_a_page_of_any_other_origin_reads_nothing(self, chromium, elsewhere, tmp_path, cors):
        page = chromium.new_page()
        page.goto(elsewhere)
        with beside(tmp_path, cors=cors) as it:
            read = page.evaluate(FETCH, [it.started.url + CHAT, KEYS["demo"][0], json.dumps(STREAM)])
            assert [] == it.engine.asked
        page.close()
        assert read.keys() == {"error"}
        assert read["error"].startswith("TypeError: ")

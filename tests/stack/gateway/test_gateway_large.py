"""Large and dense bodies are read apart from the event loop, in turns, with the result that they would have on it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from stack.config import BadConfig
from stack.gateway import large_bodies, make_key
from stack.gateway import request_body as token_requests
from stack.gateway.large_bodies import CHEAP_PIECES, FREE_BYTES, HUGE_BYTES, LARGE_BYTES, LargeBodies
from stack.gateway.refusals import RequestEnd
from stack.gateway.teams import load_policy
from stack.gateway.turns import MOST_UNRECORDED, MOST_WAITING, Turns
from tests.support.dense_bodies import dense
from tests.support.gateway_scene import ASK, CHAT, gateway, never, says
from tests.support.wait import turns, until

HUGE = 'word, \\ "é ' * (HUGE_BYTES // 12)
CASES = {
    "text": (CHAT, {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": HUGE}], "max_tokens": 9}),
    "escaped": (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "é" * HUGE_BYTES}],
        "tools": [{"a": HUGE}, {"a": HUGE}]}),
    "twice": (CHAT, {"model": "tiny", "messages": [HUGE], "tools": [HUGE]}),
    "ids": ("/v1/completions", {"model": "tiny", "prompt": [7] * HUGE_BYTES, "n": 3}),
    "image": (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": HUGE}}]}],
        "stream_options": None, "stream": 1}),
    "array": (CHAT, [HUGE]),
}  # fmt: skip


def as_read(ask: token_requests.TokenRequest) -> dict[str, Any]:
    fields = {name: bytes(value) for name, value in ask.fields.items()}
    return {name: getattr(ask, name) for name in ask.__struct_fields__ if name != "fields"} | {
        "fields": fields,
        "order": list(fields),
    }


@pytest.fixture
def bodies():
    found = LargeBodies()
    yield found
    found.close()


@pytest.mark.parametrize("case", CASES)
async def test_another_process_reads_a_huge_body_as_this_one_does(case: str, bodies: LargeBodies):
    route, content = CASES[case]
    body = json.dumps(content, ensure_ascii=case == "escaped").encode()
    assert len(body) > HUGE_BYTES
    want, got = token_requests.read(route, body), await bodies.read("a", route, body)
    assert bodies._process is not None
    assert as_read(want) == as_read(got)
    assert want.limited(3).renamed("x").ranked(5).sent == got.limited(3).renamed("x").ranked(5).sent


@pytest.mark.parametrize("case", ["text", "ids"])
def test_a_large_body_is_changed_as_a_small_one_is(case: str, monkeypatch):
    route, content = CASES[case]
    ask = token_requests.read(route, json.dumps(content | {"\u00e9": 1}).encode())
    salted = ask.salted("s")
    changed = salted.limited(2).renamed("x")
    large = salted.sent, changed.sent
    monkeypatch.setattr(token_requests, "LARGE_BYTES", 1 << 30)
    assert (salted.sent, changed.sent) == large
    assert ("s", 2) == (json.loads(large[0])["cache_salt"], json.loads(large[1])["max_tokens"])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
async def test_a_large_body_that_is_read_leniently_is_read_apart(encoding: str, bodies: LargeBodies):
    content = {"model": "tiny", "x": float("-inf"), "messages": ["word" * LARGE_BYTES], "max_tokens": 9}
    content |= {f"{at}": "x" * 2000 + "\ud800" for at in range(100)}  # not in the body as a strict decoder reads it
    ask = await bodies.read("a", CHAT, json.dumps(content).encode(encoding))
    assert bodies._process is not None
    assert ("tiny", content | {"max_tokens": 5}) == (ask.model, json.loads(ask.limited(5).sent))


async def test_a_bad_huge_body_is_described_by_the_process(bodies: LargeBodies):
    assert "JSON: expected ':'" in await bodies.describe("a", b'{"a" ' + b" " * HUGE_BYTES + b"1}", "")
    assert bodies._process is not None


async def test_ended_process_is_restarted_or_done_without(bodies: LargeBodies, monkeypatch, caplog):
    """A process that ended is started anew and one that cannot start is done without."""
    route, content = CASES["text"]
    body = json.dumps(content).encode()
    want = as_read(token_requests.read(route, body))
    assert want == as_read(await bodies.read("a", route, body))
    os.kill((first := bodies._process)._program.pid, signal.SIGKILL)
    assert want == as_read(await bodies.read("a", route, body))
    assert bodies._process not in (None, first)
    assert "" == caplog.text
    bodies._process.kill()
    monkeypatch.setattr(large_bodies, "COMMAND", (sys.executable, "-c", "pass"))
    caplog.set_level(logging.WARNING)
    assert want == as_read(await bodies.read("a", route, body))
    assert [True] == ["own process" in r.getMessage() for r in caplog.records if r.name == large_bodies._log.name]


def threads_of_readers(monkeypatch) -> list[str]:
    """Return the names of the threads in which this process reads bodies from now on."""
    seen: list[str] = []
    for module, name in ((token_requests, "read"), (large_bodies, "describe")):
        plain = getattr(module, name)

        def noted(*arguments: Any, plain: Any = plain) -> Any:
            seen.append(threading.current_thread().name)
            return plain(*arguments)

        monkeypatch.setattr(module, name, noted)
    return seen


@pytest.mark.parametrize("size", [LARGE_BYTES, LARGE_BYTES + 4096, 255 << 10])
async def test_dense_bodies_are_read_in_the_process(size: int, bodies: LargeBodies, monkeypatch):
    """Whatever makes them expensive, just below each bound and above it, and what is wrong with them."""

    def known(ask: token_requests.TokenRequest) -> dict[str, Any]:
        """Return all but the marks, which are random, of what only a lenient decoder reads."""
        return as_read(ask) | {"sent": ask.sent} | ({"fields": ..., "respelled": ...} if ask.respelled else {})

    want = {
        case: (known(ask := token_requests.read(*each)), ask.stream is None and large_bodies.describe(each[1], ""))
        for case, each in dense(size).items()
    }
    seen = threads_of_readers(monkeypatch)
    for case, (route, body) in dense(size).items():
        ask = await bodies.read("a", route, body)
        assert want[case] == (known(ask), ask.stream is None and await bodies.describe("a", body, "")), case
        assert len(ask.fields) <= CHEAP_PIECES
    # what only a lenient decoder reads has been tried by the strict one, which stops at the first byte of it
    assert len(seen) <= 2


@pytest.mark.parametrize("size", [FREE_BYTES, LARGE_BYTES])
async def test_what_is_read_on_the_loop_has_few_pieces(size: int, bodies: LargeBodies, monkeypatch):
    counted = []
    plain = token_requests.read

    def counting(route: str, body: bytes, *lenient: bool) -> token_requests.TokenRequest:
        counted.append(sum(body.count(sign) for sign in b",:[{"))
        return plain(route, body, *lenient)

    monkeypatch.setattr(token_requests, "read", counting)
    for case, (route, body) in dense(size).items():
        if case != "utf-16":  # there a strict decoder stops at the first byte
            await bodies.read("a", route, body)
    assert max(counted, default=0) <= FREE_BYTES
    text = json.dumps(ASK | {"messages": [{"content": "word, word: [" * (LARGE_BYTES // 14)}]}).encode()
    await bodies.read("a", CHAT, text)
    assert counted[-1] > CHEAP_PIECES, "text with punctuation is no dense body"


async def test_teams_take_turns_at_the_thread():
    """One that floods it has one piece of work there while others wait, also when it gives its requests up."""
    it, go_on, order = Turns("test"), threading.Event(), []

    def work(name: str) -> str:
        go_on.wait(20)
        order.append(name)
        return name

    begun = [asyncio.create_task(it.run(name[0], work, name)) for name in ("a0", "a1", "a2", "a3", "b0", "c0", "b1")]
    await turns()
    begun[0].cancel()  # its thread goes on, and so does its turn
    begun[1].cancel()
    await turns()
    go_on.set()
    done = await asyncio.gather(*begun, return_exceptions=True)
    assert ["a2", "a3", "b0", "c0", "b1"] == done[2:]
    assert ["a0", "b0", "c0", "a2", "b1", "a3"] == order
    assert "d" == await it.run("d", work, "d")
    it.close()


async def test_a_team_waits_with_a_bounded_number():
    it, go_on = Turns("test"), threading.Event()
    begun = [asyncio.create_task(it.run("a", go_on.wait, 20)) for _ in range(MOST_WAITING + 2)]
    await turns()
    begun.append(asyncio.create_task(it.run("b", go_on.wait, 20)))
    await turns()
    go_on.set()
    done = await asyncio.gather(*begun, return_exceptions=True)
    assert ["bodies_full"] == [one.reason for one in done if isinstance(one, RequestEnd)]
    assert True is done[-1]
    it.close()


async def test_a_team_passes_few_requests_without_a_record(tmp_path: Path):
    async with gateway(tmp_path, never) as it:
        waiting = [asyncio.create_task(it.post(route="/tokenize").__aenter__()) for _ in range(MOST_UNRECORDED)]
        await until(lambda: len(it.engine.asked) == MOST_UNRECORDED, "as many as may are at the engine")
        async with it.post(route="/v1/messages/count_tokens") as answer:
            said = await answer.json()
            assert (429, "team_limit", "error") == (answer.status, said["error"]["code"], said["type"])
            assert "Retry-After" in answer.headers
        other = asyncio.create_task(it.post(route="/tokenize", team="batch").__aenter__())
        await until(lambda: len(it.engine.asked) == MOST_UNRECORDED + 1, "another team has places of its own")
        for one in (*waiting, other):
            one.cancel()
        await asyncio.gather(*waiting, other, return_exceptions=True)
        it.engine.answer = says({})

        async def passes() -> bool:
            async with it.post(route="/tokenize") as answer:
                return answer.status == 200

        await until(passes, "places of clients that left are free")


async def test_a_process_that_hangs_is_done_without(bodies: LargeBodies, monkeypatch):
    monkeypatch.setattr(large_bodies, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(large_bodies, "PROCESS_S", 0.1)
    route, body = dense(LARGE_BYTES)["messages"]
    assert as_read(token_requests.read(route, body)) == as_read(await bodies.read("a", route, body))
    assert bodies._process is None


async def test_a_large_teams_file_is_read_in_the_process(tmp_path: Path, bodies: LargeBodies):
    (path := tmp_path / "teams.yaml").write_text(yaml.safe_dump({
        "teams": {f"team-{at}": {"keys": [make_key("a")[1]], "band": "fast"} for at in range(800)},
        "bands": {"fast": {"rank": 1}}, "upstreams": {"a": {"url": "http://127.0.0.1:1", "key_file": "a.key"}},
    }))  # fmt: skip
    (tmp_path / "a.key").write_text("key")
    assert path.stat().st_size > LARGE_BYTES
    assert load_policy(path) == await bodies.policy(path, path.read_text())
    assert bodies._process is not None
    path.write_text(path.read_text() + "more: 1\n")
    with pytest.raises(BadConfig) as want:
        load_policy(path)
    with pytest.raises(BadConfig) as got:
        await bodies.policy(path, path.read_text())
    assert str(want.value) == str(got.value)


async def test_the_process_ends_with_the_gateway(tmp_path: Path, monkeypatch):
    """And the engine gets the body that the client sent; the fake one takes no more than 1 MiB."""
    monkeypatch.setattr(large_bodies, "HUGE_BYTES", 300_000)
    body = json.dumps(ASK | {"messages": [{"role": "user", "content": HUGE[:400_000]}]}).encode()
    before = set(children())
    async with gateway(tmp_path, says({})) as it:
        async with it.post(body) as answer:
            assert 200 == answer.status
        assert body == it.engine.asked[0][3]
        assert 1 == len(set(children()) - before)
    await until(lambda: not set(children()) - before, "the process has ended")


def children() -> list[int]:
    """Processes that this one has started for bodies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent, command = (
                int(entry.read_text().rpartition(")")[2].split()[1]),
                (entry.parent / "cmdline").read_bytes(),
            )
        except (OSError, IndexError):
            continue
        if parent == os.getpid() and b"stack.gateway.large_bodies" in command:
            found.append(int(entry.parent.name))
    return found

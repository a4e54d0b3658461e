"""Large bodies are read apart from the event loop, with the result that they would have on it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from stack.gateway import large_bodies
from stack.gateway import request_body as token_requests
from stack.gateway.large_bodies import HUGE_BYTES, LARGE_BYTES, LargeBodies
from tests.support.gateway_scene import ASK, CHAT, gateway, says
from tests.support.wait import until

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


def told(ask: token_requests.TokenRequest) -> dict[str, Any]:
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
    want, got = token_requests.read(route, body), await bodies.read(route, body)
    assert bodies._process is not None
    assert told(want) == told(got)
    assert want.limited(3).renamed("x").ranked(5).sent == got.limited(3).renamed("x").ranked(5).sent


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
async def test_a_large_body_that_is_read_leniently_is_read_apart(encoding: str, bodies: LargeBodies):
    content = {"model": "tiny", "x": float("-inf"), "messages": ["word" * LARGE_BYTES], "max_tokens": 9}
    content |= {f"{at}": "x" * 2000 + "\ud800" for at in range(100)}  # not in the body as a strict decoder reads it
    ask = await bodies.read(CHAT, json.dumps(content).encode(encoding))
    assert bodies._process is not None
    assert ("tiny", content | {"max_tokens": 5}) == (ask.model, json.loads(ask.limited(5).sent))


async def test_a_bad_huge_body_is_described_by_the_process(bodies: LargeBodies):
    assert "JSON: expected ':'" in await bodies.describe(b'{"a" ' + b" " * HUGE_BYTES + b"1}", "")
    assert bodies._process is not None


async def test_ended_process_is_restarted_or_done_without(bodies: LargeBodies, monkeypatch, caplog):
    """A process that ended is started anew and one that cannot start is done without."""
    route, content = CASES["text"]
    body = json.dumps(content).encode()
    want = told(token_requests.read(route, body))
    assert want == told(await bodies.read(route, body))
    os.kill((first := bodies._process)._program.pid, signal.SIGKILL)
    assert want == told(await bodies.read(route, body))
    assert bodies._process not in (None, first)
    assert "" == caplog.text
    bodies._process.kill()
    monkeypatch.setattr(large_bodies, "COMMAND", (sys.executable, "-c", "pass"))
    caplog.set_level(logging.WARNING)
    assert want == told(await bodies.read(route, body))
    assert [True] == ["own process" in r.getMessage() for r in caplog.records if r.name == large_bodies._log.name]


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

"""The log against a real vLLM, to the last token: through client disconnects, refusals, n > 1, restarts and crashes of
the engine and of the sidecar itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporters.catalogue import exposition_parser, vllm
from exporters.requests.record import ended_at
from stack.lab import plan, supervisor
from tests.support.engines import Engines, get
from tests.support.live_gateway import CHAT, Gate, running
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
KINDS = ("requests", "prompt", "completion")
SHORT: dict[str, Any] = {"model": plan.MODEL, "prompt": "the cache", "max_tokens": 8, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
POLICY = {
    "teams": {"demo": {}, "narrow": {"max_in_flight": 1}, "short": {"max_prompt_tokens": 50}},
    "upstreams": {"one": {"url": "{one}"}},
}
LOOK_S = 1.0
FORMS = [{"encoding_format": form} for form in ("base64", "bytes")]


class Watched:
    """An engine, a gateway before it and a sidecar beside them, each a process; engine and sidecar can be ended and
    begun again."""

    def __init__(self, folder: Path, port: int, engines: Engines) -> None:
        self.folder, self._engines = folder, engines
        self.address = f"http://127.0.0.1:{port}"
        self.engine = engines.taken().up()
        self.before = self.engine.shown()  # others have asked this engine too, before the sidecar's first look
        self.gate: Gate
        self.sidecar: subprocess.Popen[bytes] | None = None

    def again(self) -> None:
        self.engine = self._engines.again(self.engine, "--max-num-seqs", "8", "--max-num-queued-reqs", "8").up()
        self.before = exposition_parser.Exposition()

    def watch(self) -> None:
        """Start the sidecar."""
        about = {
            "listen": self.address.removeprefix("http://"), "requests_log": [str(self.gate.log)],
            "state": str(self.folder / "state"), "gpu": "off",
            "engines": [{"name": "one", "url": self.engine.spec.address}], "engine_interval_s": LOOK_S, "patience_s": 2,
        }  # fmt: skip
        (self.folder / "sidecar.yaml").write_text(json.dumps(about))
        self.sidecar = subprocess.Popen(
            [sys.executable, "-m", "stack.cli", "sidecar", "run", "--config", self.folder / "sidecar.yaml"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=supervisor._die_with_parent,
        )  # fmt: skip
        eventually(
            lambda: (
                exposition_parser.parse(get(f"{self.address}/metrics")).total("vllm_watch_source_up", kind="engine")
                == 1
            ),
            "a first look",
        )

    def die(self) -> None:
        """SIGKILL to the sidecar."""
        assert self.sidecar
        self.sidecar.kill()
        self.sidecar.wait()

    def shown(self, family: str, kind: str, **labels: str) -> int:
        return int(
            exposition_parser.parse(get(f"{self.address}/metrics")).total(f"vllm_watch_{family}", kind=kind, **labels)
            or 0
        )

    def engine_counts(self) -> dict[str, int]:
        """What this process of the engine has finished for us."""
        names = (
            vllm.REQUEST_SUCCESS.name,
            f"{vllm.REQUEST_PROMPT_TOKENS.name}_sum",
            f"{vllm.REQUEST_GENERATION_TOKENS.name}_sum",
        )
        now = self.engine.shown()
        return {
            kind: int((now.total(name) or 0) - (self.before.total(name) or 0))
            for kind, name in zip(KINDS, names, strict=True)
        }

    def log_counts(self) -> dict[str, int]:
        """What the log holds of finished work, counted as an engine counts."""
        good = [r for r in self.gate.lines() if r.outcome == "ok" or r.finish_reason in ("stop", "length")]
        return {
            "requests": sum((r.n or 1) * (r.prompts or 1) for r in good),
            "prompt": sum((r.n or 1) * (r.prompt_tokens or 0) for r in good),
            "completion": sum(r.completion_tokens or 0 for r in good),
        }

    def settled(self) -> None:
        """Wait until a look that was made from now on has been compared with all that the log could say about it."""
        since = time.time()

        def sure() -> bool:
            found = exposition_parser.parse(get(f"{self.address}/metrics"))
            return (found.total("vllm_watch_reconcile_settled_timestamp_seconds") or 0) > since and all(
                found.total("vllm_watch_reconcile_open", kind=kind) == 0 for kind in KINDS
            )

        eventually(sure, within_s=240, what="log and engine being settled")

    def load(self, *asks: tuple[str, dict[str, Any]], at_once: int = 4) -> None:
        """Each ask by a team, through the gateway; an ask with `leave` is hung up after its first bytes."""
        asyncio.run(self._load(asks, at_once))

    async def _load(self, asks: tuple[tuple[str, dict[str, Any]], ...], at_once: int) -> None:
        turns = asyncio.Semaphore(at_once)

        async def one(session: aiohttp.ClientSession, team: str, body: dict[str, Any]) -> None:
            leave = body.pop("leave", False)
            route = body.pop("route", "chat/completions" if "messages" in body else "completions")
            url = f"{self.gate.url}/v1/{route}"
            async with (
                turns,
                session.post(url, json=body, headers={"Authorization": f"Bearer {self.gate.keys[team]}"}) as got,
            ):
                await (got.content.readany() if leave else got.read())
                if leave:
                    got.close()

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(one(session, team, dict(body)) for team, body in asks))


@pytest.fixture(scope="module")
def watched(real_engines: Engines, free_port: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    all_of_it = Watched(folder, free_port(), real_engines)
    try:
        with running(
            "one", folder, POLICY, {"one": all_of_it.engine.spec.address}, (free_port(), free_port())
        ) as all_of_it.gate:
            eventually(lambda: get(f"{all_of_it.gate.url}/-/healthy"), within_s=30, what="the gateway being ready")
            all_of_it.watch()
            yield all_of_it
            all_of_it.die()
    finally:
        all_of_it.engine.end()


def mixed(rng: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
    """What comes to an engine on a bad day: streams and not, several texts of several prompts, tools, every API,
    events above 1 MiB, client disconnects, refusals of every kind."""
    chat = {"model": plan.MODEL, "messages": CHAT["messages"], "ignore_eos": True}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("demo", SHORT),
        ("demo", SHORT | {"stream": True}),
        ("demo", chat | {"max_tokens": 12, "stream": True}),
        ("demo", chat | {"max_tokens": 6, "n": 3}),
        ("demo", SHORT | {"prompt": ["the cache", "a queue of requests"], "n": 2, "stream": True}),
        ("demo", SHORT | {"max_tokens": 20000, "stream": True, "leave": True}),
        ("demo", SHORT | {"prompt": "the cache " * 40_000}),  # longer than the model's context
        ("narrow", SHORT | {"max_tokens": 30}),
        ("short", SHORT | {"prompt": "the cache " * 200}),
        ("demo", SHORT | {"temperature": -1}),  # which the engine refuses
        ("demo", chat | {"max_tokens": 9, "tools": [TOOL], "stream": True}),
        ("demo", {"route": "responses", "input": "the cache", "max_output_tokens": 9, "user": "x" * 1_100_000,
                  "stream": True, "model": plan.MODEL}),  # which the last event repeats
        ("demo", {"route": "responses", "input": "the cache", "max_output_tokens": 9, "model": plan.MODEL}),
        ("demo", {"route": "messages", "max_tokens": 9, "stream": True, "model": plan.MODEL,
                  "messages": CHAT["messages"]}),
        ("demo", SHORT | {"prompt": [[5, 6, 7], [8, 9]], "prompt_logprobs": 3, "echo": True}),
    ]  # fmt: skip
    return [kinds[number % len(kinds)] if number < 3 * len(kinds) else rng.choice(kinds) for number in range(count)]


def test_mixed_load_agrees_to_the_last_token(watched: Watched):
    """After a mixed load log and engine agree to the last token and a crash of the sidecar changes nothing."""
    rng = random.Random(5)
    watched.load(*mixed(rng, 50))
    watched.die()
    watched.load(*mixed(rng, 30))
    watched.watch()
    watched.load(*mixed(rng, 30))
    watched.settled()
    outcomes = {record.outcome for record in watched.gate.lines()}
    assert {"ok", "client_abort", "rejected"} <= outcomes
    engine = watched.engine_counts()
    assert engine["requests"] > 60
    assert engine == watched.log_counts()
    for kind in KINDS:
        assert (
            engine[kind]
            == watched.shown("reconcile_engine_total", kind)
            == watched.shown("reconcile_logged_total", kind)
        ), kind
        assert 0 == watched.shown("missing_in_log_total", kind) == watched.shown("extra_in_log_total", kind), kind
    # What was left before its usage is estimated beside the exact tokens, and in no comparison.
    shown, lines = exposition_parser.parse(get(f"{watched.address}/metrics")), watched.gate.lines()
    for kind in ("prompt", "completion"):
        assert sum(getattr(record, f"{kind}_tokens") or 0 for record in lines) == shown.total(
            "vllm_watch_tokens_total", type=kind
        )
    assert (
        sum(record.est_completion_tokens or 0 for record in lines)
        == shown.total("vllm_watch_estimated_tokens_total", type="completion")
        > 0
    )


def test_vectors_in_every_form_agree_to_the_token(real_engines: Engines, free_port: Any, tmp_path: Path):
    """As JSON, and as bytes with their usage in a header of up to 100 kB. bytes_only has no usage: it is unknown."""
    engine = real_engines.own("--runner", "pooling").up()
    text, many = {"model": plan.MODEL, "input": "the cache"}, {"input": ["the cache", "a queue of requests"] * 500}
    bodies = [text, text | many, *(text | form for form in FORMS), *(text | many | form for form in FORMS)]

    async def load(gate: Gate, *bodies: dict[str, Any]) -> None:
        key = {"Authorization": f"Bearer {gate.keys['demo']}"}
        async with aiohttp.ClientSession(headers=key, max_field_size=1 << 20) as session:
            for body in bodies:
                async with session.post(f"{gate.url}/v1/embeddings", json=body) as got:
                    assert 200 == got.status
                    await got.read()

    policy = {"teams": {"demo": {}}, "upstreams": {"one": {"url": "{one}"}}}
    try:
        with running("vectors", tmp_path, policy, {"one": engine.spec.address}, (free_port(), free_port())) as gate:
            eventually(lambda: get(f"{gate.url}/-/healthy"), within_s=30, what="the gateway being ready")
            before = engine.figure(vllm.PROMPT_TOKENS)
            asyncio.run(load(gate, *bodies))
            lines = eventually(lambda: (found := gate.lines())[len(bodies) - 1] and found, "the records")
            counted = engine.figure(vllm.PROMPT_TOKENS) - before
            assert counted == sum(line.prompt_tokens or 0 for line in lines) > 8000
            asyncio.run(load(gate, text | {"encoding_format": "bytes_only"}))
            last = eventually(lambda: gate.lines()[len(bodies)], "the last record")
            assert ("ok", None, None) == (last.outcome, last.prompt_tokens, last.unreadable)
    finally:
        engine.end()


def test_what_went_round_the_gateway_is_unlogged_to_the_token(watched: Watched):
    """One request in fifty."""
    watched.load(*[("demo", SHORT)] * 49)
    before = watched.engine_counts()

    async def aside() -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{watched.engine.spec.address}/v1/completions", json=SHORT) as got,
        ):
            assert 200 == got.status
            await got.read()

    asyncio.run(aside())
    watched.settled()
    aside_of = {kind: count - before[kind] for kind, count in watched.engine_counts().items()}
    assert 1 == aside_of["requests"]
    assert aside_of == {kind: watched.shown("missing_in_log_total", kind) for kind in KINDS}
    assert [0, 0, 0] == [watched.shown("extra_in_log_total", kind) for kind in KINDS]


@pytest.mark.breaks_engine
def test_over_a_drained_restart_both_go_on_and_agree(watched: Watched):
    missing_in_log = {kind: watched.shown("missing_in_log_total", kind) for kind in KINDS}
    before = watched.engine_counts()
    watched.engine.end()
    watched.again()
    watched.load(*mixed(random.Random(6), 30))
    watched.settled()
    after = watched.engine_counts()
    for kind in KINDS:
        assert before[kind] + after[kind] == watched.shown("reconcile_engine_total", kind), kind
        assert watched.log_counts()[kind] + missing_in_log[kind] == watched.shown("reconcile_engine_total", kind), kind
    assert missing_in_log == {kind: watched.shown("missing_in_log_total", kind) for kind in KINDS}
    assert [0, 0, 0] == [watched.shown("extra_in_log_total", kind) for kind in KINDS]


@pytest.mark.breaks_engine
def test_killed_engine_leaves_a_gap_by_cause(watched: Watched):
    """A killed engine leaves a gap of no more than what finished since the last look and it is told by cause."""
    missing_in_log = {kind: watched.shown("missing_in_log_total", kind) for kind in KINDS}
    watched.load(*[("demo", SHORT)] * 20)
    killed_s = time.time()
    watched.engine.end(signal.SIGKILL)
    watched.again()
    watched.load(*[("demo", SHORT)] * 10)
    watched.settled()
    late = [
        r
        for r in watched.gate.lines()
        if killed_s - LOOK_S - 1 < (ended_at(r) or 0) <= killed_s + 1 and r.outcome == "ok"
    ]
    lost = {
        kind: watched.log_counts()[kind] + missing_in_log[kind] - watched.shown("reconcile_engine_total", kind)
        for kind in KINDS
    }
    assert 0 <= lost["requests"] <= len(late)
    assert lost == {kind: watched.shown("extra_in_log_total", kind, cause="restart") for kind in KINDS}
    assert lost == {kind: watched.shown("extra_in_log_total", kind) for kind in KINDS}
    assert missing_in_log == {kind: watched.shown("missing_in_log_total", kind) for kind in KINDS}

"""A gateway process before a real engine, with the requests of its tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from exporters.catalogue import exposition_parser
from exporters.catalogue.gateway import UNREADABLE
from exporters.requests.record import RequestRecord, parse_line
from stack.gateway import make_key
from stack.lab import plan, supervisor
from tests.support.engines import CONTEXT, get
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]


SOON_S = 30.0  # for what takes moments on a quiet machine


LIMITED = 2  # requests that the second engine takes


CHAT: dict[str, Any] = {
    "model": plan.MODEL,
    "messages": [{"role": "user", "content": "the cache of the server"}],
    "max_tokens": 12,
    "extra_body": {"ignore_eos": True},
}


LONG = CHAT | {"max_tokens": 30000}  # a minute and more: it is over soon only if it is broken off


IDS = "X-Request-Id"


Ask = Callable[[Any], Any]  # a client -> what it returns


# Every gateway of this file: what its teams.yaml says. {one}, {two}: where the engines are.
ONE, TWO = {"url": "{one}"}, {"url": "{two}"}


GATES: dict[str, Any] = {
    "terms": {
        "teams": {
            "demo": {}, "narrow": {"max_in_flight": 1}, "short": {"max_prompt_tokens": 50},
            "clamped": {"max_output_tokens": 4},
            "brief": {"max_output_tokens": 4, "over_output": "refuse"}, "other": {"models": ["another"]},
            "hurried": {"band": "hurried"}, "leaver": {},
        },
        "bands": {"default": {"rank": 1}, "hurried": {"rank": 1, "total_s": 3.0}},
        "models": {plan.MODEL: {"max_model_len": CONTEXT}, "another": {}},
        "upstreams": {"one": ONE},
    },
    "canary": {"teams": {"demo": {}},
        "upstreams": {"stable": ONE | {"weight": 95}, "canary": ONE | {"weight": 5, "variant": "canary"}}},
    "limited": {"teams": {"demo": {}}, "upstreams": {"two": TWO}},
    "spare": {"teams": {"demo": {}}, "upstreams": {"two": TWO, "one": ONE},
        "models": {plan.MODEL: {"upstreams": ["two"], "fallbacks": ["one"]}}},
}  # fmt: skip


@dataclass
class Gate:
    """A gateway in a process of its own. offered: the id of every request that was sent to it."""

    name: str
    url: str
    metrics_url: str
    log: Path
    keys: Mapping[str, str]
    offered: list[str] = field(default_factory=list)

    def lines(self) -> list[RequestRecord]:
        written = self.log.read_bytes() if self.log.exists() else b""
        return [parse_line(line) for line in written.splitlines(keepends=True) if line.endswith(b"\n")]

    def records(self, names: Iterable[str]) -> list[RequestRecord]:
        """The records of these requests, in this order, once they are written."""
        wanted = list(names)

        def written() -> dict[str, RequestRecord]:
            found = {record.request_id: record for record in self.lines()}
            assert not (missing := set(wanted) - set(found)), f"not on record: {missing}"
            return found

        found = eventually(written, "the records") if wanted else {}
        return [found[name] for name in wanted]

    def offer(self, name: str = "") -> str:
        """Counts a request that is sent, under this id or, where it is sent again or has none, under another."""
        name = f"{self.name}-{next(_numbers)}" if name in ("", *self.offered) else name
        self.offered.append(name)
        return name

    def caller(self, team: str = "demo", way: str = "sync", retries: int = 0) -> Caller:
        """team: or a key that is nobody's."""
        return Caller(self, self.keys.get(team, team), way, retries)


_numbers = itertools.count()


@dataclass
class Caller:
    """The official client in one of its two forms. sent: the ids of what its last call has sent, with the time of
    each."""

    gate: Gate
    key: str
    way: str
    retries: int
    sent: dict[str, float] = field(default_factory=dict)

    def __call__(self, ask: Ask) -> Any:
        """What the client returns or raises; of a stream the list of its events."""
        self.sent.clear()
        if self.way == "async":
            return asyncio.run(self._later(ask))
        with self.client() as client:
            got = ask(client)
            return list(got) if isinstance(got, openai.Stream) else got

    async def _later(self, ask: Ask) -> Any:
        async with self.async_client() as client:
            got = await ask(client)
            return [event async for event in got] if isinstance(got, openai.AsyncStream) else got

    @contextlib.contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        with openai.DefaultHttpxClient(event_hooks={"request": [self._send]}) as http:
            yield openai.OpenAI(
                base_url=f"{self.gate.url}/v1", api_key=self.key, max_retries=self.retries, http_client=http
            )

    @contextlib.asynccontextmanager
    async def async_client(self) -> AsyncIterator[openai.AsyncOpenAI]:
        async def send(request: Any) -> None:
            self._send(request)

        async with openai.DefaultAsyncHttpxClient(event_hooks={"request": [send]}) as http:
            yield openai.AsyncOpenAI(
                base_url=f"{self.gate.url}/v1", api_key=self.key, max_retries=self.retries, http_client=http
            )

    def _send(self, request: Any) -> None:
        """Called with every request just before it goes out, however often the client tries. A look at the models is no
        request for tokens."""
        if request.method == "POST":
            name = request.headers[IDS] = self.gate.offer(request.headers.get(IDS, ""))
            self.sent[name] = time.monotonic()

    def records(self) -> list[RequestRecord]:
        """Of all that the last call has sent."""
        return self.gate.records(list(self.sent))

    def record(self) -> RequestRecord:
        """Of the one request that the last call has sent."""
        (found,) = self.records()
        return found


@contextlib.contextmanager
def running(
    name: str,
    folder: Path,
    policy: Any,
    engines: Mapping[str, str],
    ports: tuple[int, int],
    liveness: Mapping[str, Any] = {"probe": False},
    anonymous: str | None = None,
) -> Iterator[Gate]:
    """A gateway under this policy, from its start to its peaceful end. liveness: as in gateway.yaml. anonymous: team of
    requests without a key."""
    keys = {team: make_key(team) for team in policy["teams"]}
    said = policy | {"teams": {team: terms | {"keys": [keys[team][1]]} for team, terms in policy["teams"].items()}}
    said["upstreams"] = {
        name: upstream | {"url": upstream["url"].format(**engines)} for name, upstream in policy["upstreams"].items()
    }
    (folder / "teams.yaml").write_text(json.dumps(said))
    listen, metrics_listen = (f"127.0.0.1:{port}" for port in ports)
    settings = {"listen": listen, "metrics_listen": metrics_listen, "liveness": liveness, "anonymous_team": anonymous}
    (folder / "gateway.yaml").write_text(json.dumps(settings))
    process = subprocess.Popen(
        [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", folder / "gateway.yaml"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=supervisor._die_with_parent,
    )  # fmt: skip
    try:
        yield Gate(
            name,
            f"http://{listen}",
            f"http://{metrics_listen}",
            folder / "requests.jsonl",
            {team: key for team, (key, _) in keys.items()},
        )
        if process.poll() is None:
            shown = exposition_parser.parse(get(f"http://{metrics_listen}/metrics"))
            assert not shown.total(UNREADABLE.name), "no answer of a real engine is unreadable"
        process.terminate()
        assert 0 == process.wait(60)
    finally:
        process.kill()
        process.wait()

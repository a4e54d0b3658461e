"""Two gateways of the lab before one real vLLM: answers of DuckDB and ClickHouse from the data set of their logs equal
the counters of their sidecars and of the engine, for every documented view.

Among the requests are aborted, rejected and retried ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner

from exporters.catalogue import reconciled, sidecar, vllm
from exporters.catalogue.exposition_parser import Exposition
from exporters.dataset import engine_sql, views
from exporters.dataset.query import RequestData, RequestSource, open_requests
from exporters.requests.record import RequestRecord
from stack.cli import main
from stack.lab import plan
from tests.support.broken_upstream import BrokenUpstream
from tests.support.engine_rows import difference, of_clickhouse, rows_of
from tests.support.engines import Engine, Engines
from tests.support.gateway_fleet import FleetClients, GatewayFleet
from tests.support.ports import free_offset
from tests.support.wait import until

pytestmark = pytest.mark.engine

SIDECARS = ("sidecar", "sidecar-1")
TIMES = {
    "ttft": sidecar.TTFT, "tpot": sidecar.TPOT, "e2e": sidecar.E2E, "queue": sidecar.QUEUE,
    "engine_queue": sidecar.ENGINE_QUEUE,
}  # fmt: skip
KINDS = ("prompt", "cached", "completion")


@pytest.fixture(scope="module")
def engine(real_engines: Engines) -> Iterable[Engine]:
    found = real_engines.own("--max-num-seqs", "4").up()
    yield found
    found.end()


async def aborted(fleet: GatewayFleet, name: str) -> None:
    """Leave a stream after its first tokens."""
    headers = {"Authorization": f"Bearer {fleet.keys['demo']}", "X-Request-Id": name}
    body = {"model": plan.MODEL, "prompt": "a b c", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{fleet.url}/v1/completions", json=body, headers=headers)
        await answer.content.readany()
        answer.close()


async def rejected(fleet: GatewayFleet, name: str) -> None:
    """Ask for more than the context holds."""
    headers = {"Authorization": f"Bearer {fleet.keys['demo']}", "X-Request-Id": name}
    body = {"model": plan.MODEL, "prompt": "a b c", "max_tokens": 40_000}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.url}/v1/completions", json=body, headers=headers) as answer,
    ):
        assert 400 == answer.status


async def load(fleet: GatewayFleet) -> None:
    clients = [FleetClients(fleet.url, fleet.keys[team], team, tokens=12) for team in ("demo", "default")]
    for client in clients:
        client.begin(3)
    await until(lambda: all(len(client.answered) > 15 for client in clients), "requests of both teams")
    await asyncio.gather(*(aborted(fleet, f"a{number}") for number in range(3)))
    await asyncio.gather(*(rejected(fleet, f"x{number}") for number in range(4)))
    for client in clients:
        await client.end()
        assert {} == client.failed
    expected = sum(len(client.answered) for client in clients) + 7
    await until(lambda: sum(map(len, fleet.records())) == expected, "a record of each request")


async def counted(fleet: GatewayFleet, records: int) -> list[Exposition]:
    """Return the pages of the sidecars once all records are counted and compared with the engine."""

    async def is_done() -> bool:
        pages = [await fleet.page(name) for name in SIDECARS]
        read = sum(page.total(sidecar.REQUESTS.name) or 0 for page in pages)
        known = [pages[0].total(metric.name, kind="requests") for metric in (reconciled.LOGGED, reconciled.ENGINE)]
        return read == records and known[0] == known[1] and bool(known[0])

    await until(is_done, "sidecars that have counted all records, and agree with the engine")
    return [await fleet.page(name) for name in SIDECARS]


def total(pages: list[Exposition], name: str, **labels: str) -> float:
    return sum(page.total(name, **labels) or 0.0 for page in pages)


def ship(fleet: GatewayFleet, folder: Path) -> Path:
    """Ship the log of each gateway, as a writer of its own."""
    for replica in fleet.config.replicas:
        settings = {
            "dataset": "data", "cluster": "lab", "writer": replica.gateway, "state": f"state-{replica.index}",
            "requests_log": [str(replica.log)],
        }  # fmt: skip
        file = folder / f"ship-{replica.index}.yaml"
        file.write_text(yaml.safe_dump(settings))
        done = CliRunner().invoke(main, ["ship", "run", "--once", "--config", str(file)])
        assert 0 == done.exit_code, done.output
    return folder / "data"


async def test_every_view_equals_the_counters(engine: Engine, part: Any, tmp_path: Path):
    programs = {name: part(name).path for name in ("valkey", "haproxy")}
    broken = ThreadingHTTPServer(("127.0.0.1", 0), BrokenUpstream)
    Thread(target=broken.serve_forever, daemon=True).start()
    fleet = GatewayFleet(tmp_path / "lab", programs, engine.spec.address, 2, 8, free_offset(plan.PORTS.values()))
    upstreams = {"engine": {"url": engine.spec.address}, "broken": {"url": f"http://127.0.0.1:{broken.server_port}"}}
    served = {"upstreams": ["engine", "broken"], "fallbacks": ["engine"], "max_model_len": 32_768}
    with (fleet.config.folder / "teams.yaml").open("a") as teams:
        teams.write(yaml.safe_dump({"upstreams": upstreams, "models": {plan.MODEL: served}}))
    before = engine.shown()
    async with fleet:
        await load(fleet)
        records = [record for log in fleet.records() for record in log]
        pages = await counted(fleet, len(records))
    broken.shutdown()
    outcomes = Counter(record.outcome for record in records)
    assert (3, 4) == (outcomes["client_abort"], outcomes["rejected"])
    assert sum(record.tried is not None for record in records) > 3, "retries"
    data_folder = ship(fleet, tmp_path)
    with open_requests(RequestSource(location=str(data_folder))) as data:
        equal_to_counters(data, pages)
        equal_to_engine(data, engine.shown(), before)
        equal_to_records(data, records)
        session = pytest.importorskip("chdb.session").Session()
        try:
            for statement in engine_sql.clickhouse(str(data_folder)):
                session.query(statement)
            found = {
                view.name: of_clickhouse(session, f"SELECT * FROM vllm_watch.{view.name}")  # noqa: S608
                for view in views.VIEWS
            }
        finally:
            session.close()
        different = {name: difference(rows_of(data, name), rows) for name, rows in found.items()}
        assert dict.fromkeys(different) == different


def equal_to_counters(data: RequestData, pages: list[Exposition]) -> None:
    """Views traffic, reasons, latency and phases, by model and team."""
    traffic, latency = rows_of(data, "traffic"), rows_of(data, "latency")
    assert {"demo", "default"} == {row["team"] for row in traffic}
    for row in traffic:
        who = {"model_name": row["model"], "team": row["team"]}
        for outcome in (*views.OUTCOMES, "unknown"):
            assert row[outcome] == total(pages, sidecar.REQUESTS.name, **who, outcome=outcome)
        for kind in KINDS:
            assert (row[f"{kind}_tokens"] or 0) == total(pages, sidecar.TOKENS.name, **who, type=kind)
        for kind in ("prompt", "completion"):
            estimated = row[f"estimated_{kind}_tokens"] or 0
            assert estimated == total(pages, sidecar.ESTIMATED_TOKENS.name, **who, type=kind)
    for row in rows_of(data, "reasons"):
        who = {"model_name": row["model"], "team": row["team"], "outcome": row["outcome"], "reason": row["reason"]}
        assert row["requests"] == total(pages, sidecar.REASONS.name, **who)
    reasons = sum(row["requests"] for row in rows_of(data, "reasons"))
    assert reasons == total(pages, sidecar.REASONS.name) == 7
    for row in latency:
        who = {"model_name": row["model"], "team": row["team"]}
        for name, metric in TIMES.items():
            assert row[f"{name}_count"] == total(pages, f"{metric.name}_count", **who), name
            assert (row[f"{name}_sum_ms"] or 0) / 1000 == pytest.approx(total(pages, f"{metric.name}_sum", **who)), name
    e2e_s = sum(row["e2e_ms"] for row in rows_of(data, "phases")) / 1000
    assert e2e_s == pytest.approx(total(pages, f"{sidecar.E2E.name}_sum"))


def equal_to_engine(data: RequestData, after: Exposition, before: Exposition) -> None:
    """View finished: what the engine counts of requests that it finished."""

    def grown(name: str) -> float:
        return (after.total(name) or 0.0) - (before.total(name) or 0.0)

    rows = rows_of(data, "finished")
    found = {name: sum(row[name] for row in rows) for name in ("requests", *(f"{kind}_tokens" for kind in KINDS))}
    prompt, computed = (
        grown(f"{metric.name}_sum") for metric in (vllm.REQUEST_PROMPT_TOKENS, vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS)
    )
    assert {
        "requests": grown(f"{vllm.REQUEST_PROMPT_TOKENS.name}_count"), "prompt_tokens": prompt,
        "cached_tokens": prompt - computed, "completion_tokens": grown(f"{vllm.REQUEST_GENERATION_TOKENS.name}_sum"),
    } == found  # fmt: skip
    assert found["cached_tokens"] > 0


def equal_to_records(data: RequestData, records: list[RequestRecord]) -> None:
    """Views requests, hourly, engines and phases, of which no sidecar has counters."""
    assert {record.request_id for record in records} == {row["request_id"] for row in rows_of(data, "requests")}
    hourly, engines = rows_of(data, "hourly"), rows_of(data, "engines")
    assert len(records) == sum(row["requests"] for row in hourly)
    assert 7 == sum(row["errors"] for row in hourly)
    prompt = sum(record.prompt_tokens or 0 for record in records)
    assert (
        prompt == sum(row["prompt_tokens"] or 0 for row in hourly) == sum(row["prompt_tokens"] or 0 for row in engines)
    )
    (one,) = engines
    at_engine = [record for record in records if record.upstream is not None]
    assert ("engine", len(at_engine)) == (one["engine"], one["requests"])
    assert sum(record.tried is not None for record in at_engine) == one["failed_before"]
    for row in rows_of(data, "phases"):
        parts = sum(value for name, value in row.items() if name.endswith("_ms") and name != "e2e_ms")
        assert row["e2e_ms"] == pytest.approx(parts)

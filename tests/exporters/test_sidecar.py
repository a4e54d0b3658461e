"""The sidecar as Prometheus sees it: over HTTP, with sources that live and die."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import ClientSession, web
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from exporters.catalogue import OURS, reconciled
from exporters.gpu import readings
from exporters.net import bounded_read
from exporters.sidecar import Prices, Sidecar
from exporters.sidecar_config import EngineTarget, SidecarConfig
from exporters.sidecar_listener import application
from exporters.source_status import REASONS, SourceStatus
from stack import cli, config
from tests.support.sidecar_scene import GOLDEN, FakeEngine, values
from tests.support.wait import until


@pytest.fixture
async def fake_engine():
    engine = FakeEngine()
    engine.url = await engine.start()  # type: ignore[attr-defined]
    yield engine
    await engine.runner.cleanup()


async def test_dead_engine_leaves_the_log_on_the_page(tmp_path, fake_engine):
    """Log and engine meet on one page and a dead engine leaves the rest."""
    log, events = tmp_path / "requests.jsonl", tmp_path / "events.jsonl"
    log.write_text(
        '{"request_id":"a","team":"demo","model":"tiny","outcome":"ok","prompt_tokens":3,"ttft_ms":12}\nnonsense\n'
    )
    settings = SidecarConfig(
        requests_log=(str(log),),
        engines=(EngineTarget("e", fake_engine.url),),
        gpu="off",
        events=str(events),
        engine_interval_s=0.05,
    )
    sidecar = Sidecar(settings, "9.9")
    await sidecar.start()
    try:
        await until(lambda: sidecar.ready)
        found = values(sidecar.page())
        assert 1 == found["vllm_watch_requests_total", "model_name=tiny", "outcome=ok", "team=demo"]
        assert 1 == found["vllm_watch_log_bad_lines_total", "reason=json"]
        assert 1 == found["vllm_watch_source_up", "kind=engine", "source=e"]
        assert (
            "vllm_watch_engine_info",
            "cache_dtype=auto",
            "enable_prefix_caching=True",
            "upstream=e",
            "version=0.32.0",
        ) in found

        fake_engine.status = 500
        await until(lambda: not sidecar.sources[1].up)
        with log.open("a") as file:
            file.write('{"request_id":"b","team":"demo","model":"tiny","outcome":"ok"}\n')
        await until(lambda: sidecar.ledger.committed_lines == 2)
        found = values(sidecar.page())
        assert 0 == found["vllm_watch_source_up", "kind=engine", "source=e"]
        assert found["vllm_watch_source_errors_total", "kind=engine", "reason=http_5xx", "source=e"] >= 1
        assert 2 == found["vllm_watch_requests_total", "model_name=tiny", "outcome=ok", "team=demo"]
        assert any(name[0] == "vllm_watch_kv_blocks" for name in found), (
            "what the engine last said stays, with its age beside it"
        )

        fake_engine.status, fake_engine.text = 200, (GOLDEN / "0.32.0-preempt-under-load.prom").read_text()
        await until(lambda: sidecar.histories["e"].restarts == 1)
        await until(
            lambda: (
                events.exists()
                and {"restart", "config"} <= {json.loads(line)["kind"] for line in events.read_text().splitlines()}
            )
        )
    finally:
        await sidecar.stop()


async def test_serves_three_addresses_with_known_names(tmp_path, fake_engine):
    """It serves its three addresses and knows every name it serves."""
    log = tmp_path / "requests.jsonl"
    record = {
        "request_id": "x",
        "team": "t",
        "model": "m",
        "outcome": "timeout",
        "finish_reason": "abort",
        "cache_hit": False,
        "prompt_tokens": 1,
    }
    record |= dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "engine_queue_ms"), 1)
    log.write_text(json.dumps(record) + "\n")
    settings = SidecarConfig(
        requests_log=(str(log),),
        engines=(EngineTarget("e", fake_engine.url),),
        gpu="off",
        events=str(tmp_path / "events.jsonl"),
    )
    runner = web.AppRunner(application(Sidecar(settings)))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        async with ClientSession() as session:
            assert 200 == (await session.get(f"{base}/-/healthy")).status

            async def ready() -> bool:
                return (await session.get(f"{base}/-/ready")).status == 200

            await until(ready)
            answer = await session.get(f"{base}/metrics")
            text = await answer.text()
    finally:
        await runner.cleanup()
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    known = {metric.name: metric for metric in OURS}
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" if family.type == "counter" else family.name
        assert name in known, f"{name} is not in the catalogue"
        for sample in family.samples:
            assert set(known[name].labels) == set(sample.labels) - {"le"}, name
            assert sample.name in known[name].samples or sample.name == name


async def test_what_stands_in_a_bad_line_is_never_logged(tmp_path, caplog):
    """A foreign log may hold prompts."""
    log = tmp_path / "requests.jsonl"
    lines = ['{"prompt":"SECRET"}', "SECRET {", '{"request_id":["SECRET"]}']
    lines += [f'{{"request_id":"a","{field}":"SECRET"}}' for field in ("ts", "outcome")]
    log.write_text("".join(line + "\n" for line in lines))
    sidecar = Sidecar(SidecarConfig(requests_log=(str(log),), gpu="off"))
    await sidecar.start()
    try:
        await until(lambda: sum(sidecar.ledger.tallies.bad.values()) == 5)
    finally:
        await sidecar.stop()
    assert f"{log}: a line of {len(lines[0])} bytes" in caplog.text
    assert "SECRET" not in caplog.text


async def test_long_log_is_shown_once_read_to_its_end(tmp_path):
    """A scrape in the middle of the re-reading would make Prometheus take the rest for new traffic."""
    log = tmp_path / "requests.jsonl"
    rest = '"team":"demo","model":"tiny","outcome":"ok","prompt_tokens":3,"ttft_ms":12}'
    log.write_text("".join(f'{{"request_id":"{number}",{rest}\n' for number in range(60_000)))
    sidecar = Sidecar(SidecarConfig(requests_log=(str(log),), gpu="off"))
    await sidecar.start()
    try:
        shown = set()
        while not (found := values(sidecar.page())).get(("vllm_watch_log_lines_total",)):
            shown |= {name[0] for name in found}
            await asyncio.sleep(0)
        assert 60_000 == found["vllm_watch_log_lines_total",]
        assert "vllm_watch_log_unread_bytes" in shown
        assert "vllm_watch_requests_total" not in shown
    finally:
        await sidecar.stop()


def line(number: int | str, **about) -> str:
    return json.dumps({"request_id": f"r{number}", "team": "demo", "model": "tiny", "outcome": "ok", **about}) + "\n"


async def test_a_log_that_cannot_be_read_hides_no_other(tmp_path):
    log, folder = tmp_path / "requests.jsonl", tmp_path / "folder"
    log.write_text(line(1))
    folder.mkdir()
    sidecar = Sidecar(SidecarConfig(requests_log=(str(log), str(folder)), gpu="off"))
    await sidecar.start()
    try:
        await until(lambda: sidecar.ready and sidecar.logs.shown)
        assert 1 == values(sidecar.page())["vllm_watch_log_lines_total",]
        assert not sidecar.logs.at_end, "what it holds nobody knows, so nothing is sure to be in no log"
    finally:
        await sidecar.stop()


def test_half_line_of_a_dead_writer_is_behind_the_end(tmp_path):
    """Half a line whose writer died is behind the end and what comes after it is not."""
    log = tmp_path / "requests.jsonl"
    log.write_text(line(1) + '{"request_id":"r2')
    logs = Sidecar(SidecarConfig(requests_log=(str(log),), gpu="off")).logs
    (tail,) = logs.tails
    logs.poll(tail, 0, 0)
    assert not logs.at_end
    logs.poll(tail, 0, 1)
    assert logs.at_end
    with log.open("a") as file:
        file.write('"}\n')
    assert not logs.at_end


def test_killed_first_reading_is_not_shown_early(tmp_path, monkeypatch):
    """A first reading that was killed half way is not shown before its end."""
    monkeypatch.setattr("exporters.ingest.BATCH_BYTES", 1)
    monkeypatch.setattr("exporters.requests.positions.CHUNK_BYTES", 2000)
    log = tmp_path / "requests.jsonl"
    log.write_text("".join(line(number) for number in range(100)))
    settings = SidecarConfig(requests_log=(str(log),), gpu="off", state=str(tmp_path / "state"))

    def read(sidecar: Sidecar) -> bool:
        more = sidecar.logs.poll(sidecar.logs.tails[0], 0, 0)
        write = sidecar.logs.begin_commit()
        write()
        sidecar.ledger.succeeded()
        return more

    for _ in range(2):
        sidecar = Sidecar(settings)
        assert read(sidecar)
        assert 0 < sidecar.ledger.committed_lines < 100
        assert ("vllm_watch_log_lines_total",) not in values(sidecar.page())
        assert 1 == values(sidecar.page())["vllm_watch_checkpoint_up",]
        sidecar._checkpoint.close()
    sidecar = Sidecar(settings)
    while read(sidecar):
        pass
    assert 100 == values(sidecar.page())["vllm_watch_log_lines_total",]
    sidecar._checkpoint.close()


async def test_unreachable_log_is_unknown_after_a_restart(tmp_path):
    """Else its rotated files, a month of history, would be taken for what came in between."""
    folder = tmp_path / "logs"
    folder.touch()
    settings = SidecarConfig(requests_log=(str(folder / "log"),), gpu="off", state=str(tmp_path / "state"))
    sidecar = Sidecar(settings)
    await sidecar.start()
    try:
        await until(lambda: sidecar.ledger.commits)
    finally:
        await sidecar.stop()
    folder.unlink()
    folder.mkdir()
    (folder / "log").write_text(line(1))
    (folder / "log.1").write_text(line("old"))
    logs = Sidecar(settings).logs
    logs.poll(logs.tails[0], 0, 0)
    assert 1 == logs.ledger.tallies.lines


async def test_spelling_of_the_path_does_not_matter(tmp_path, monkeypatch):
    """Also by the state of a release that kept a relative path as it stood: what was written before a rotation would be
    lost else."""
    path, log = tmp_path / "sidecar.yaml", tmp_path / "log"
    path.write_text("requests_log: [log]\nstate: state\ngpu: 'off'\n")
    monkeypatch.chdir(tmp_path)

    async def counted(settings: SidecarConfig) -> int:
        sidecar = Sidecar(settings)
        await sidecar.start()
        try:
            await until(
                lambda: (
                    sidecar.logs.shown
                    and sidecar.ledger.committed_lines == sidecar.ledger.tallies.lines
                    and sidecar.logs.at_end
                )
            )
        finally:
            await sidecar.stop()
        return sidecar.ledger.tallies.lines

    log.write_text(line(1))
    assert 1 == await counted(SidecarConfig(requests_log=("log",), state="state", gpu="off"))
    for number, spelled in enumerate((path, Path("sidecar.yaml"), Path("..") / tmp_path.name / "sidecar.yaml"), 2):
        with log.open("a") as file:
            file.write(line(f"{number}, before it was renamed"))
        log.rename(tmp_path / f"log.{10 - number}")
        log.write_text(line(number))
        assert 2 * number - 1 == await counted(config.sidecar(spelled))


async def test_clock_that_is_set_back_an_hour_stalls_no_reconciliation(tmp_path, fake_engine, monkeypatch):
    """Requests that an engine finished after the step and nobody logged are booked as soon as they would be without
    it."""
    set_back_s = 0.0
    clock = SimpleNamespace(
        time=lambda: time.time() - set_back_s, monotonic=time.monotonic, perf_counter=time.perf_counter
    )
    monkeypatch.setattr("exporters.sidecar.time", clock)
    monkeypatch.setattr("exporters.sidecar.SETTLE_S", 0.1)
    log = tmp_path / "requests.jsonl"
    log.touch()
    engines = (EngineTarget("e", fake_engine.url),)
    sidecar = Sidecar(
        SidecarConfig(requests_log=(str(log),), engines=engines, gpu="off", engine_interval_s=0.05, patience_s=0.3)
    )

    def missing_in_log() -> float:
        found = values(sidecar.page())
        return sum(
            value
            for (name, *labels), value in found.items()
            if name == reconciled.MISSING_IN_LOG.name and "kind=requests" in labels
        )

    await sidecar.start()
    try:
        await until(lambda: any(name[0] == reconciled.SETTLED.name for name in values(sidecar.page())))
        assert 0 == missing_in_log()
        set_back_s = 3600.0
        fake_engine.text = _FINISHED.sub(lambda line: f"{line[1]}{float(line[2]) + 5}", fake_engine.text, count=1)
        await until(lambda: missing_in_log() == 5)
        settled = [value for name, value in values(sidecar.page()).items() if name[0] == reconciled.SETTLED.name]
        assert clock.time() == pytest.approx(settled[0], abs=10), "it is shown by the clock as it is now"
    finally:
        await sidecar.stop()


_FINISHED = re.compile(r'^(vllm:request_success_total\{.*finished_reason="stop".*\} )(.*)$', re.MULTILINE)


async def test_accounting_fault_stops_neither_engine_nor_log(tmp_path, fake_engine, monkeypatch, caplog):
    """A fault in the accounts takes neither the engine nor the log down."""
    log = tmp_path / "requests.jsonl"
    log.write_text(line(1))
    sidecar = Sidecar(
        SidecarConfig(
            requests_log=(str(log),), engines=(EngineTarget("e", fake_engine.url),), gpu="off", engine_interval_s=0.05
        )
    )

    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("a fault")

    for place in ("on_scrape", "settle"):
        monkeypatch.setattr(sidecar.accounts, place, fail)
    await sidecar.start()
    try:
        await until(lambda: {"engine e", "log"} <= sidecar._unbooked)
        with log.open("a") as file:
            file.write(line(2))
        await until(lambda: sidecar.ledger.committed_lines == 2)
        found = values(sidecar.page())
        assert {"log": 1, "engine": 1, "accounts": 0} == {
            name[1][5:]: value for name, value in found.items() if name[0] == "vllm_watch_source_up"
        }
        assert any(name[0] == "vllm_watch_engine_info" for name in found)
        assert 2 == caplog.text.count("cannot process data"), "each told once"
        monkeypatch.undo()
        await until(lambda: sidecar._accounts_source.up)
    finally:
        await sidecar.stop()


async def test_a_count_that_cannot_be_stored_does_not_end_the_reading(tmp_path, monkeypatch):
    log = tmp_path / "requests.jsonl"
    log.write_text(line(1))
    sidecar = Sidecar(SidecarConfig(requests_log=(str(log),), gpu="off"))
    changed = sidecar.ledger.traffic.changed

    def fail() -> dict[tuple[str, str], bytes]:
        raise OverflowError("can't serialize ints > 2**64 - 1")

    sidecar.ledger.traffic.changed = fail
    await sidecar.start()
    try:
        await until(lambda: not sidecar._accounts_source.up)
        sidecar.ledger.traffic.changed = changed
        await until(lambda: sidecar._accounts_source.up)
        assert 1 == values(sidecar.page())["vllm_watch_log_lines_total",]
    finally:
        await sidecar.stop()


async def test_unwritable_events_wait_beside_the_engine(tmp_path, fake_engine):
    """Events that cannot be written wait and do not take the engine down."""
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "events.jsonl")
    settings = SidecarConfig(
        engines=(EngineTarget("e", fake_engine.url),), gpu="off", events=nowhere, engine_interval_s=0.05
    )
    sidecar = Sidecar(settings)
    await sidecar.start()
    try:
        await until(lambda: sidecar.sources[0].up)
        fake_engine.text = (GOLDEN / "0.32.0-preempt-under-load.prom").read_text()
        await until(lambda: sidecar.histories["e"].restarts == 1)
        await until(lambda: sidecar.sources[1].errors)
        assert sidecar.sources[0].up
        assert "restart" == sidecar._unwritten[0].kind
    finally:
        await sidecar.stop()


async def test_failure_reason_stands_at_0_before_its_first(tmp_path, fake_engine):
    """A series that is born at 1 never grew: the first failure would be on no board."""
    log, events = str(tmp_path / "requests.jsonl"), str(tmp_path / "events.jsonl")
    settings = SidecarConfig(
        requests_log=(log,), engines=(EngineTarget("e", fake_engine.url),), gpu="off", events=events
    )
    sidecar = Sidecar(settings)
    await sidecar.start()
    try:
        await until(lambda: sidecar.ready)
        found = values(sidecar.page())
    finally:
        await sidecar.stop()
    told = {name[1:3]: value for name, value in found.items() if name[0] == "vllm_watch_source_errors_total"}
    assert {"kind=accounts", "kind=log", "kind=engine", "kind=events"} == {kind for kind, _ in told}
    assert 0 == told["kind=engine", "reason=http_5xx"]
    assert 0 == told["kind=engine", "reason=unreachable"]
    assert set(readings.REASONS) < set(REASONS["gpu"])


async def test_probe_endpoints_answer_for_one_engine(fake_engine):
    """Its values stand still under load for longer than the limit; a wrong name is 404, so that it restarts nobody."""
    fake_engine.text = (GOLDEN / "0.32.0-preempt-under-load.prom").read_text()
    sidecar = Sidecar(SidecarConfig(engines=(EngineTarget("e", fake_engine.url),), gpu="off", engine_interval_s=0.05))
    sidecar._limits = replace(sidecar._limits, slow_s=0.1, suspect_s=0.2, out_s=1e9, unprobed_s=1e9)
    runner = web.AppRunner(application(sidecar))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/-/engine"
    address = fake_engine.url.removeprefix("http://")
    try:
        async with ClientSession() as session:

            async def statuses(query: str = "") -> list[int]:
                return [(await session.get(f"{base}-{probe}{query}")).status for probe in ("ready", "live")]

            assert [200, 200] == await statuses(f"?address={address}")
            for limit, expected in (("out_s", [503, 200]), ("unprobed_s", [503, 503])):  # out of rotation, then hung
                sidecar._limits = replace(sidecar._limits, **{limit: 0.3})

                async def shown(expected: list[int] = expected) -> bool:
                    return await statuses("?upstream=e") == expected

                await until(shown, what=f"{expected}")
            assert [503, 503] == await statuses()
            assert [404, 404] == await statuses("?upstream=other")
    finally:
        await runner.cleanup()


async def test_a_page_without_end_is_cut_and_counted(tmp_path, fake_engine, monkeypatch):
    monkeypatch.setattr(bounded_read, "MOST_BYTES", 1000)
    sidecar = Sidecar(SidecarConfig(engines=(EngineTarget("e", fake_engine.url),), gpu="off"))
    await sidecar.start()
    try:
        await until(lambda: sidecar.sources[0].tried)
        assert {"bad_page": 1} == sidecar.sources[0].errors
    finally:
        await sidecar.stop()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("listne: x", r"yaml: listne .* listen\?"),
        ("listen: 9401", r"sidecar\.yaml: listen: .*`str`"),
        ("listen: here", "'here' .* host:port"),
        ("engines: [{name: a, url: 127.0.0.1:8000}]", r"engines\[0\]: url '127.0.0.1:8000' .* http://127.0.0.1:8000"),
        ("engines: [{name: a, ulr: x}]", r"engines\[0\]\.ulr .* url\?"),
        ("engines: [{name: a}]", r"engines\[0\]\.url is missing"),
        ("field_names: {a: prompt_token}", r"field_names .*'prompt_token', .* prompt_tokens\?"),
        ("a: [", r"sidecar\.yaml, line 1: invalid YAML"),
        ("engine_interval_s: 0", "0 seconds"),
        ("requests_log: [a, a]", "requests_log .* twice"),
    ],
)
def test_a_mistake_in_the_configuration_names_its_place(text, values, tmp_path):
    path = tmp_path / "sidecar.yaml"
    path.write_text(text)
    with pytest.raises(config.BadConfig, match=values):
        config.load(path, SidecarConfig)


def test_a_taken_port_is_told_with_the_setting(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path, address = tmp_path / "sidecar.yaml", f"127.0.0.1:{taken.getsockname()[1]}"
        path.write_text(f"listen: {address}\ngpu: 'off'\n")
        result = CliRunner().invoke(cli.main, ["sidecar", "run", "--config", str(path)])
    assert 2 == result.exit_code
    assert re.search(f"listen: {address} is taken .* listen$", result.output, re.MULTILINE)
    assert "Traceback" not in result.output


def test_cost_needs_prices_and_gpus():
    """Two GPUs at 2.5 an hour; no price, no series: an alert on them is then absent and not wrong."""
    prices = Prices(gpu_hour=2.5, budget_per_1k_tokens=0.002, currency="EUR")
    priced, free = (Sidecar(SidecarConfig(prices=p)) for p in (prices, None))
    for sidecar in (priced, free):
        assert ("vllm_watch_gpu_cost_per_hour", "currency=EUR") not in values(sidecar.page())
        sidecar._gpu_source = SourceStatus("gpu", "gpu", up=True, last_success_s=time.time())
        sidecar._gpus = [readings.GpuReading(uuid=uuid) for uuid in ("GPU-a", "GPU-b")]
    assert 5.0 == values(priced.page())["vllm_watch_gpu_cost_per_hour", "currency=EUR"]
    assert 0.002 == values(priced.page())["vllm_watch_cost_budget_per_1k_tokens", "currency=EUR"]
    assert not [name for name, *_ in values(free.page()) if "cost" in name]


def test_a_price_of_nothing_is_refused_with_the_way_out():
    with pytest.raises(config.BadConfig, match="omit `prices`"):
        config.parse("prices: {gpu_hour: 0}", SidecarConfig, "sidecar.yaml")

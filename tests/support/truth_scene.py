"""Percentiles by PromQL, by the request log and by three clients on one engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from exporters.catalogue import promql, sidecar
from exporters.catalogue.metric import Metric
from exporters.requests.record import RequestRecord, parse_block
from stack.gateway import make_key
from stack.lab import plan
from tests.support.bench_processes import ALONE, running
from tests.support.bench_server import until_ready
from tests.support.ports import free_port
from tests.support.wait import eventually

if TYPE_CHECKING:
    from openai import AsyncOpenAI

BEGIN, END = "<!-- measured: truth -->", "<!-- end -->"

ROOT = Path(__file__).parents[2]


QUANTILES = (0.5, 0.95, 0.99)


NATIVE, CLASSIC = 0.02, 0.10  # how far a quantile may be from that of the request log


NEAR_MS = 1.0  # or so far


LADDERS = {"sidecar": "coarse", "fine": "fine"}  # a sidecar with each, by scrape job, on the same log


FIRST = 80  # requests of each team that are not compared


KNOWN = 0.8  # of the records have a time and are known by id; on a busy machine more replies come in one piece


SLOTS = 24  # of the gateway; the engine runs 16 at once, so a burst of 40 waits in both


@dataclass(frozen=True, slots=True)
class Time:
    """A time of a request. field: its name in the log. theirs: its name in what `vllm bench serve` reports, if it
    does."""

    name: str
    metric: Metric
    field: str
    theirs: str | None = None


TIMES = (
    Time("TTFT", sidecar.TTFT, "ttft_ms", "ttft"),
    Time("TPOT", sidecar.TPOT, "tpot_ms", "tpot"),
    Time("end to end", sidecar.E2E, "e2e_ms", "e2el"),
    Time("gateway queue", sidecar.QUEUE, "queue_ms"),
    Time("engine queue", sidecar.ENGINE_QUEUE, "engine_queue_ms"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens in and out, and how many requests at once.

    every_s: as many again after so long, whether the ones before are done or not."""

    name: str
    prompt: int
    output: int
    at_once: int
    every_s: float | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    """What a client measured, in milliseconds: its own percentiles, and single requests by their id in the request
    log."""

    percentiles: Mapping[tuple[str, float], float]
    single: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What PromQL computes, in milliseconds. beyond: the value is a bound, "<" or ">" which the quantile lies."""

    ms: float
    beyond: str = ""

    def misses(self, truth_ms: float, share: float) -> bool:
        """Return whether it is further from the truth than that share of it and NEAR_MS."""
        if self.beyond:
            return truth_ms > self.ms if self.beyond == "<" else truth_ms < self.ms
        return abs(self.ms - truth_ms) > max(share * truth_ms, NEAR_MS)

    def off(self, truth_ms: float) -> float:
        """Return the error as a share of the truth; 0 where it is a bound or as near as NEAR_MS."""
        return (self.ms - truth_ms) / truth_ms if not self.beyond and abs(self.ms - truth_ms) > NEAR_MS else 0.0

    def __str__(self) -> str:
        return f"{self.beyond}{' ' * bool(self.beyond)}{self.ms:.4g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One quantile of one time, in milliseconds. below_ms: one rank below log_ms; clients interpolate between the two.

    classic: with the fine ladder. coarse: with the default one. client_ms: by the client. added_ms: what the client's
    time of a request has beyond the log's, 1st and 99th percentile."""

    client: str
    shape: str
    time: str
    q: float
    log_ms: float
    below_ms: float
    native: Answer
    classic: Answer
    coarse: Answer
    client_ms: float | None
    added_ms: tuple[float, float] | None

    @property
    def faults(self) -> Iterator[str]:
        """What is beyond its limit."""
        place = f"{self.client}, {self.shape}, {self.time} p{self.q * 100:.0f}"
        for name, answer, share in (("native", self.native, NATIVE), ("fine ladder", self.classic, CLASSIC)):
            if answer.misses(self.log_ms, share):
                yield f"{place}: {name} {answer} ms, the log {self.log_ms:.4g} ms"
        if self.client_ms is not None and self.added_ms is not None:
            low, high = self.added_ms
            room = max(NATIVE * self.native.ms, NEAR_MS)
            least = low - (self.log_ms - self.below_ms)
            if not least - room <= self.client_ms - self.native.ms <= high + room:
                says = f"the client says {self.client_ms:.4g} ms, PromQL {self.native} ms"
                yield f"{place}: {says}, and what the client adds is {low:.4g} to {high:.4g} ms"


def ranked(values: Sequence[float], q: float) -> tuple[float, float]:
    """Return the value at rank q, the nearest one above, whose bucket Prometheus looks for; and before it the one
    below."""
    ordered, at = sorted(values), math.ceil(q * len(values)) - 1
    return ordered[max(0, at - 1)], ordered[at]


def percentile(values: Sequence[float], q: float) -> float:
    """Return the value at rank q."""
    return ranked(values, q)[1]


@dataclass(slots=True)
class Scene:
    """Gateway, sidecars and Prometheus before an engine. keys: of the teams."""

    url: str
    prometheus: str
    log: Path
    model: Path
    keys: Mapping[str, str]
    before: dict[str, int] = field(default_factory=dict)  # lines of a team in the log before it was measured
    since_s: float = 0.0  # when all of those were in Prometheus

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, folder: Path, engine: str, teams: Mapping[str, Shape], programs: Mapping[str, Path], core: int
    ) -> Iterator[Scene]:
        """The scene on one core, each second scraped."""
        port, metrics, prometheus = (free_port() for _ in range(3))
        sidecars = {job: free_port() for job in LADDERS}
        made = {team: make_key(team) for team in teams}
        log, ours_ = folder / "requests.jsonl", [sys.executable, "-m", "stack.cli"]
        terms = {
            "teams": {team: {"keys": [hashed]} for team, (_, hashed) in made.items()},
            "capacity": {"slots": SLOTS, "queue": 4096},
        }
        (folder / "teams.yaml").write_text(yaml.safe_dump(terms))
        (folder / "gateway.yaml").write_text(
            yaml.safe_dump(
                {
                    "listen": f"127.0.0.1:{port}",
                    "metrics_listen": f"127.0.0.1:{metrics}",
                    "upstream": engine,
                    "requests_log": str(log),
                    "teams": str(folder / "teams.yaml"),
                }
            )
        )
        for job, at in sidecars.items():
            config = {
                "listen": f"127.0.0.1:{at}",
                "requests_log": [str(log)],
                "gpu": "off",
                "histogram_ladder": LADDERS[job],
            }
            (folder / f"{job}.yaml").write_text(yaml.safe_dump(config))
        targets = sidecars | {"gateway": metrics}
        jobs = [{"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{at}"]}]} for job, at in targets.items()]
        often = {"scrape_interval": "1s", "scrape_timeout": "1s", "always_scrape_classic_histograms": True}
        (folder / "prometheus.yml").write_text(yaml.safe_dump({"global": often, "scrape_configs": jobs}))
        env = {"PYTHONPATH": str(ROOT)}
        server = [
            programs["prometheus"], f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
            f"--web.listen-address=127.0.0.1:{prometheus}", "--enable-feature=native-histograms",
        ]  # fmt: skip
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                running([*ours_, "gateway", "run", "--config", folder / "gateway.yaml"], port, core, env)
            )
            for job, at in sidecars.items():
                stack.enter_context(
                    running([*ours_, "sidecar", "run", "--config", folder / f"{job}.yaml"], at, core, env)
                )
            stack.enter_context(running(server, prometheus, core))
            keys = {team: key for team, (key, _) in made.items()}
            scene = cls(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{prometheus}", log, programs["model"], keys)
            until_ready(scene.prometheus)
            asyncio.run(scene._begin(teams))
            yield scene

    async def _begin(self, shapes: Mapping[str, Shape]) -> None:
        """Send a few requests of each team, so that its series are there before they grow, and are not near 0.

        rate() extrapolates a counter to before its first sample, but not below 0: of classic buckets that are near 0
        some grow more than others, so that requests appear between them. These requests are therefore like those that
        follow, and so many that those of an engine which is still warming up are the smaller part."""
        for team, shape in shapes.items():
            await OpenAI().run(self, team, replace(shape, every_s=None), FIRST)
        self._until(lambda: all(FIRST == self._counted(team) for team in self.keys), "the first requests of each team")
        self.before, self.since_s = dict.fromkeys(self.keys, FIRST), time.time()
        # Scrapes that show those and no more: what was in the first sample is no growth.
        query = f"min(timestamp({sidecar.REQUESTS.name}))"
        self._until(lambda: float(self.ask(query)[0]["value"][1]) > self.since_s + 2, "two more scrapes")

    def ask(self, query: str, at_s: float | None = None) -> list[dict[str, Any]]:
        asked = {"query": query} | ({} if at_s is None else {"time": at_s})
        with urllib.request.urlopen(
            f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode(asked)}", timeout=30
        ) as got:
            result: list[dict[str, Any]] = json.load(got)["data"]["result"]
        return result

    def records(self, team: str) -> list[RequestRecord]:
        """What the log has of a team since it is measured."""
        found, bad = parse_block(self.log.read_bytes())
        assert not bad
        return [record for record in found if record.team == team][self.before.get(team, 0) :]

    def _counted(self, team: str) -> float:
        """Return how many requests of a team every sidecar has counted."""
        found = [float(one["value"][1]) for one in self.ask(f'sum by (job) ({sidecar.REQUESTS.name}{{team="{team}"}})')]
        return min(found) if len(found) == len(LADDERS) else 0

    def _until(self, holds: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
        eventually(holds, f"{what} in Prometheus", within_s, every_s=0.2)

    def rows(self, client: str, shape: Shape, team: str, reported: Reported) -> Iterator[Row]:
        """Compare one run."""
        sent = len(reported.single)
        self._until(
            lambda: sent <= len(self.records(team)) == self._counted(team) - self.before[team],
            f"{sent} requests of {team}",
        )
        records = self.records(team)
        assert all(record.outcome == "ok" for record in records), {record.reason for record in records}
        scraped = {job: self._scraped(job, team) for job in LADDERS}
        for kind in TIMES:
            logged = {
                record.request_id: value for record in records if (value := getattr(record, kind.field)) is not None
            }
            # The text of a reply may come in one piece, as where its tokens are parts of one character: it has no TPOT.
            assert len(logged) >= KNOWN * len(records), (
                f"{len(logged)} of {len(records)} records of {client} have {kind.field}"
            )
            both = [name for name, theirs in reported.single.items() if kind.name in theirs and name in logged]
            assert kind.theirs is None or len(both) >= KNOWN * len(records), (
                f"{client}: {len(both)} of {len(records)} known by id"
            )
            added = [reported.single[name][kind.name] - logged[name] for name in both]
            range_ = (percentile(added, 0.01), percentile(added, 0.99)) if added else None
            classic = replace(kind.metric, native=False)
            for q in QUANTILES:
                below, truth = ranked(list(logged.values()), q)
                native = self._quantile(q, kind.metric, team, "sidecar", scraped)
                fine, coarse = (self._quantile(q, classic, team, job, scraped) for job in ("fine", "sidecar"))
                theirs_ms = reported.percentiles.get((kind.name, q))
                yield Row(client, shape.name, kind.name, q, truth, below, native, fine, coarse, theirs_ms, range_)

    def _scraped(self, job: str, team: str) -> tuple[float, float]:
        """Return when a sidecar was scraped first and last since it is measured, in Unix seconds.

        rate() adds what it takes for growth between an end of its window and the nearest scrape, of each bucket by
        itself. With both ends at scrapes there is nothing to add, whatever scrapes are missing."""
        window_s = math.ceil(time.time() - self.since_s)
        found = self.ask(f'{sidecar.REQUESTS.name}{{job="{job}", team="{team}"}}[{window_s}s]')
        times = sorted({at for series in found for at, _ in series["values"] if at >= self.since_s})
        return times[0], times[-1]

    def _quantile(
        self, q: float, metric: Metric, team: str, job: str, scraped: Mapping[str, tuple[float, float]]
    ) -> Answer:
        first_s, last_s = scraped[job]
        window = f"{round(1000 * (last_s - first_s)) + 1}ms"
        where = (f'job="{job}"', f'team="{team}"')
        (found,) = self.ask(promql.bounded_quantile(q, metric, window, ("team",), where), last_s)
        return Answer(1000 * float(found["value"][1]), found["metric"].get(promql.BOUND, ""))


@dataclass(frozen=True, slots=True)
class OpenAI:
    """The official Python client; it has no figures of its own, so its user measures."""

    name: str = "openai"
    rng: Random = field(default_factory=lambda: Random(7))

    async def run(self, scene: Scene, team: str, shape: Shape, requests: int) -> Reported:
        import openai  # here, since it takes a second, which only a test with an engine needs

        single: dict[str, dict[str, float]] = {}
        free = asyncio.Semaphore(shape.at_once if shape.every_s is None else requests)
        async with openai.AsyncOpenAI(
            base_url=f"{scene.url}/v1", api_key=scene.keys[team], max_retries=0, timeout=120
        ) as client:

            async def one(name: str) -> None:
                async with free:
                    single[name] = await self._measured(client, shape, name)

            async with asyncio.TaskGroup() as group:
                for at in range(requests):
                    if at and shape.every_s and at % shape.at_once == 0:
                        await asyncio.sleep(shape.every_s)
                    group.create_task(one(f"{team}-{at}"))
        times = {name: [of[name] for of in single.values() if name in of] for name in ("TTFT", "TPOT", "end to end")}
        return Reported({(name, q): percentile(values, q) for name, values in times.items() for q in QUANTILES}, single)

    async def _measured(self, client: AsyncOpenAI, shape: Shape, name: str) -> dict[str, float]:
        prompt = [self.rng.randrange(10, 340) for _ in range(shape.prompt)]
        began, at, tokens = time.perf_counter(), [], 0
        stream = await client.completions.create(
            model=plan.MODEL,
            prompt=prompt,
            max_tokens=shape.output,
            stream=True,
            temperature=0,
            stream_options={"include_usage": True},
            extra_headers={"X-Request-Id": name},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                at.append(time.perf_counter())
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
        ended = time.perf_counter()
        times = {"TTFT": 1000 * (at[0] - began), "end to end": 1000 * (ended - began)}
        return times | ({"TPOT": 1000 * (at[-1] - at[0]) / (tokens - 1)} if len(at) > 1 else {})


class VllmBench:
    """`vllm bench serve`, with its own percentiles."""

    name = "vllm bench serve"

    def __init__(self, program: Path, folder: Path) -> None:
        self._program, self._folder = program, folder

    async def run(self, scene: Scene, team: str, shape: Shape, requests: int) -> Reported:
        # Of arrivals with burstiness b about 1 in b comes after a pause, and the others all at once.
        pace = ("--max-concurrency", shape.at_once)
        if shape.every_s is not None:
            pace = ("--request-rate", shape.at_once / shape.every_s, "--burstiness", 1 / shape.at_once)
        argv = [
            self._program, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions", "--base-url",
            scene.url, "--model", plan.MODEL,
            "--tokenizer", scene.model, "--dataset-name", "random", "--random-input-len", shape.prompt,
            "--random-output-len", shape.output,
            "--random-range-ratio", 0, "--ignore-eos", "--temperature", 0, "--num-prompts", requests, *pace,
            "--ready-check-timeout-sec", 0,
            "--request-id-prefix", f"{team}-", "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles",
            "50,95,99", "--disable-tqdm",
            "--save-result", "--save-detailed", "--result-dir", self._folder, "--result-filename", f"{team}.json",
        ]  # fmt: skip
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        _finished(argv, {**quiet, "OPENAI_API_KEY": scene.keys[team]})
        result = json.loads((self._folder / f"{team}.json").read_text())
        theirs = {kind.name: kind.theirs for kind in TIMES if kind.theirs}
        single = {}
        for at, (ttft, itls, tokens) in enumerate(
            zip(result["ttfts"], result["itls"], result["output_lens"], strict=True)
        ):
            single[f"{team}-{at}"] = {
                "TTFT": 1000 * ttft, "TPOT": 1000 * sum(itls) / (tokens - 1), "end to end": 1000 * (ttft + sum(itls)),
            }  # fmt: skip
        return Reported(
            {(name, q): result[f"p{q * 100:.0f}_{their}_ms"] for name, their in theirs.items() for q in QUANTILES},
            single,
        )


# Their names, and what makes them milliseconds.
_OF_GUIDELLM = {
    "TTFT": ("time_to_first_token_ms", 1),
    "TPOT": ("inter_token_latency_ms", 1),
    "end to end": ("request_latency", 1000),
}


class Guidellm:
    """GuideLLM, with its own percentiles. Its inter_token_latency is our TPOT; its time_per_output_token holds the
    TTFT."""

    name = "guidellm"

    def __init__(self, program: Path, folder: Path) -> None:
        self._program, self._folder = program, folder

    async def run(self, scene: Scene, team: str, shape: Shape, requests: int) -> Reported:
        out, trace = self._folder / f"{team}.json", self._folder / f"{team}.jsonl"
        data: dict[str, Any] = {"kind": "synthetic_text", "prompt_tokens": shape.prompt, "output_tokens": shape.output}
        profile: dict[str, Any] = {"kind": "concurrent", "streams": [shape.at_once]}
        constraints = [{"kind": "max_requests", "count": requests}]
        if shape.every_s is not None:
            times = [at // shape.at_once * shape.every_s for at in range(requests)]
            trace.write_text(
                "".join(
                    json.dumps({"timestamp": at, "input_length": shape.prompt, "output_length": shape.output}) + "\n"
                    for at in times
                )
            )
            data = {"kind": "trace_synthetic", "source": {"kind": "json_file", "path": str(trace)}}
            profile, constraints = {"kind": "replay", "schedule_turn": "timestamp"}, []
        spec = {
            "backend": {"kind": "openai_http", "target": scene.url, "model": plan.MODEL, "api_key": scene.keys[team],
                "validate_backend": False},
            "profile": profile, "data": [data], "tokenizer": {"kind": "hf_auto", "model": str(scene.model)},
            "constraints": constraints, "outputs": [{"kind": "json", "path": str(out)}],
        }  # fmt: skip
        (self._folder / f"{team}.yaml").write_text(yaml.safe_dump({"spec": spec}))
        _finished(
            [self._program, "run", "-c", self._folder / f"{team}.yaml", "--disable-console"], {"HF_HUB_OFFLINE": "1"}
        )
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
        metrics = {
            name: benchmark["metrics"][their]["successful"]["percentiles"] for name, (their, _) in _OF_GUIDELLM.items()
        }
        percentiles = {
            (name, q): of[f"p{q * 100:.0f}"] * _OF_GUIDELLM[name][1] for name, of in metrics.items() for q in QUANTILES
        }
        single = {
            one["response_id"].partition("-")[2]: {
                name: one[their] * scale for name, (their, scale) in _OF_GUIDELLM.items() if one[their] is not None
            }
            for one in benchmark["requests"]["successful"]
        }
        return Reported(percentiles, single)


Client = OpenAI | VllmBench | Guidellm


def _finished(argv: Sequence[object], env: Mapping[str, str]) -> None:
    done = subprocess.run(
        [str(part) for part in argv], env={**ALONE, **env}, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"{argv[0]} {argv[1]}: {(done.stdout + done.stderr)[-3000:]}")


def measured(scene: Scene, runs: Iterable[tuple[Client, Shape, str]], requests: int) -> Iterator[Row]:
    """Run each client with each shape and team, one after the other, and compare."""
    for client, shape, team in runs:
        began = time.monotonic()
        reported = asyncio.run(client.run(scene, team, shape, requests))
        rows = list(scene.rows(client.name, shape, team, reported))
        told = f"{client.name}, {shape.name}: {len(scene.records(team))} requests in {time.monotonic() - began:.0f} s"
        sys.stderr.write(f"{told}\n{table(rows)}\n")
        yield from rows


def team_of(client: Client, shape: Shape) -> str:
    return f"{client.name}-{shape.name}".replace(" ", "-")


def summary(rows: Sequence[Row]) -> str:
    """The worst of each time, as a Markdown table."""
    heads = (
        "time",
        "quantiles",
        "native: worst",
        "median",
        "fine ladder: worst",
        "median",
        "coarse ladder: worst",
        "median",
        "clients add",
    )
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for kind in TIMES:
        of = [row for row in rows if row.time == kind.name]
        cells = []
        for name in ("native", "classic", "coarse"):
            off = [getattr(row, name).off(row.log_ms) for row in of]
            cells += [f"{max(off, key=abs):+.1%}", f"{median(map(abs, off)):.1%}"]
        added = [row.added_ms for row in of if row.added_ms]
        told = f"{min(low for low, _ in added):.1f} to {max(high for _, high in added):.1f} ms" if added else ""
        lines.append(f"| {kind.name} | {len(of)} | {' | '.join(cells)} | {told} |")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """Every quantile, as a Markdown table: log, native, classic fine and coarse, client, in milliseconds."""
    heads = ("client", "shape", "time", *(f"p{q * 100:.0f}" for q in QUANTILES), "client adds")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for at in range(0, len(rows), len(QUANTILES)):
        of = rows[at : at + len(QUANTILES)]
        cells = []
        for row in of:
            client = [] if row.client_ms is None else [f"{row.client_ms:.4g}"]
            cells.append(" / ".join([f"{row.log_ms:.4g}", *map(str, (row.native, row.classic, row.coarse)), *client]))
        first = of[0]
        added = f"{first.added_ms[0]:.2f} to {first.added_ms[1]:.2f}" if first.added_ms else ""
        lines.append(f"| {first.client} | {first.shape} | {first.time} | {' | '.join(cells)} | {added} |")
    return "\n".join(lines)


def written(page: str, rows: Sequence[Row], told: str) -> str:
    """Return the page with the measured block made anew."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    cell = "Each cell: request log / native / fine ladder / coarse ladder / the client itself, in ms."
    return f"{before}{BEGIN}\n{told}\n\n{summary(rows)}\n\n{cell}\n\n{table(rows)}\n{END}{after}"

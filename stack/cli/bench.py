"""`vllm-watch bench`: run workloads against an engine, import results."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from exporters import process
from stack.bench import importer, result, run, workload, workload_file, workload_fit
from stack.bench.engine_under_test import Subject, look
from stack.bench.load import BenchTarget, Done
from stack.bench.measurements import Startup, startup
from stack.bench.result import Bench, Run
from stack.bench.workload import LoadLevel, Workload, WorkloadFile
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors
from stack.cli.options import ENGINE_URL, LIMITS
from stack.root import version
from stack.terminal import output_width
from stack.tuning.run_comparison import smallest_effect

T = TypeVar("T")
SEED_HELP = "Seed of prompts, lengths, times and order; a used seed finds its prompts in the cache.  [default: random]"
NO_LIMIT = 1 << 40  # tokens, where the engine does not say
FIGURES = (
    "ttft_ms.p50",
    "ttft_ms.p95",
    "tpot_ms.p50",
    "e2e_ms.p95",
    "queue_ms.mean",
    "tokens_per_second",
    "qps",
    "goodput_qps",
    "hit_ratio",
    "error_ratio",
)


@click.group()
def bench() -> None:
    """Run a workload against an engine and measure it."""


@bench.command("run")
@click.argument("what", metavar="WORKLOAD")
@click.option(
    "--engine",
    "url",
    metavar="URL",
    required=True,
    envvar=ENGINE_URL,
    show_envvar=True,
    help="URL of vLLM, such as http://127.0.0.1:8000.",
)
@click.option("--model", help="Served model name, if there are several.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with an API key for the engine, sent as bearer token.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Output folder.  [default: bench-WORKLOAD-TIME]"
)
@click.option("--only", multiple=True, metavar="NAME|POINT", help="Only this workload or load, such as c8; repeatable.")
@click.option("--runs", type=click.IntRange(1, 1000), help="Runs of each load.  [default: from the workload, else 6]")
@click.option("--requests", type=click.IntRange(1), help="Requests in a run; overrides the workload.")
@click.option("--scale", type=float, help="Factor for every length, to fit a shorter context.")
@click.option("--seed", type=int, help=SEED_HELP)
@click.option(
    "--engine-log",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="vLLM's start-up log, for memory of weights and KV cache.",
)
@click.option("--name", default="", help="Title for the report.")
@AS_JSON
def bench_run(
    what: str,
    url: str,
    model: str | None,
    api_key_file: Path | None,
    out: Path | None,
    only: tuple[str, ...],
    runs: int | None,
    requests: int | None,
    scale: float | None,
    seed: int | None,
    engine_log: Path | None,
    name: str,
    as_json: bool,
) -> None:
    """Run a workload and record every request.

    Run a WORKLOAD, a file or one of those that `bench list` names, and write every request and every run's figures
    to a folder.

    Ctrl-C keeps what was measured by then. Exit 1 when it broke off.

    \b
    Example:  vllm-watch bench run short-short --engine http://127.0.0.1:8000 --only c4 --runs 2
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with mistakes_as_errors():
        key = api_key_file.read_text().strip() if api_key_file else None
        suite = workload_file.load(what)
        subject = wait(
            _subject("", url, model, key, startup(engine_log.read_text(errors="replace")) if engine_log else Startup())
        )
        suite, points = chosen(suite, only, subject.engine.max_model_len, scale, requests)
        seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        folder = fresh(out or Path(f"bench-{suite.workloads[0].name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"))
        steps = run.schedule(
            suite.workloads, points, [(subject.name,)] * run.rounds_of(suite.workloads, runs), runs, True
        )
        wait(foretell(console, subject, suite, steps, 1, seed))
        screen = Screen(console)

        async def same(_: str) -> Subject:
            return subject

        bencher = run.Bencher(
            folder,
            name or suite.workloads[0].name,
            f"vllm-watch {version()}",
            suite.workloads,
            steps,
            same,
            screen,
            seed,
            scale=scale or 1.0,
        )
        found = measured(bencher, screen)
    if as_json:
        click.echo(json_text(msgspec.to_builtins(found)))
    else:
        show(page_console(), found, suite.metrics)
        click.echo(f"written to {folder}")
    raise SystemExit(1 if found.cut else 0)


@bench.command("list")
@AS_JSON
def bench_list(as_json: bool) -> None:
    """List the included workloads.

    \b
    Example:  vllm-watch bench list
    """
    suites = {name: workload_file.load(path) for name, path in workload_file.included().items()}
    rows = [
        (each.name, " ".join(point.label for point in workload.points(each)), each.about)
        for suite in suites.values()
        for each in suite.workloads
    ]
    if as_json:
        click.echo(
            json_text([{"name": name, "points": points.split(), "about": about} for name, points, about in rows])
        )
        return
    table = Table("workload", "loads", "what it is")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False, width=output_width(120)).print(table)


@bench.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Output folder.")
@LIMITS
def bench_import(files: tuple[Path, ...], out: Path, limits: tuple[str, ...]) -> None:
    """Import results of vLLM's bench, AIPerf or guidellm.

    Read results of `vllm bench serve --save-result --save-detailed`, AIPerf's profile_export.jsonl (with the
    profile_export_aiperf.json beside it) or guidellm's benchmarks.json, to be compared and reported like our own. Give
    all loads of a sweep at once.

    \b
    Example:  vllm-watch bench import benchmarks.json --out sweep --limit ttft_ms=500
    """
    with mistakes_as_errors():
        found, records = importer.imported(files, workload.slo_of(limits))
        folder = fresh(out)
        result.add_requests(folder, records)
        result.write(folder, found)
    show(page_console(), found, ())
    click.echo(f"written to {folder}")


async def _subject(name: str, url: str, model: str | None, key: str | None, started: Startup) -> Subject:
    found, _ = await look(url, model, key)
    return Subject(name or found.model, BenchTarget(found.url, found.model, key), found, startup=started)


def page_console() -> Console:
    """For what is the result: as wide as its tables where nobody sees a terminal."""
    return Console(highlight=False, soft_wrap=True, width=output_width(140))


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Runs it to its end."""
    with process.runner(batches=True) as runner:
        return runner.run(work)


def chosen(
    suite: WorkloadFile, only: Sequence[str], context: int | None, scale: float | None, requests: int | None
) -> tuple[WorkloadFile, Callable[[Workload], Sequence[LoadLevel]]]:
    """Return what to run of a file, cut to the engine's context, and at which loads. Raises BadConfig and
    ValueError."""
    names = {each.name for each in suite.workloads}
    labels = {point.label for each in suite.workloads for point in workload.points(each)}
    if unknown := sorted(set(only) - names - labels):
        raise ValueError(
            f"--only {unknown[0]} is neither a workload nor a load of this file; there are"
            f" {', '.join(sorted(names | labels))}"
        )
    wanted, loads = set(only) & names or names, set(only) & labels or labels

    def points(each: Workload) -> Sequence[LoadLevel]:
        return [point for point in workload.points(each) if point.label in loads]

    mine = [each for each in suite.workloads if each.name in wanted and points(each)]
    if not mine:
        raise ValueError(f"--only {' --only '.join(only)} leaves nothing: {', '.join(sorted(wanted))} has no such load")
    if requests is not None:
        mine = [msgspec.structs.replace(each, requests=requests) for each in mine]
        for sentence in workload_file.mistakes(WorkloadFile(workloads=tuple(mine))):
            raise ValueError(f"with {requests} requests in a run, {sentence}")
    return (
        WorkloadFile(
            workloads=tuple(workload_fit.fitting(each, context or NO_LIMIT, scale) for each in mine),
            metrics=suite.metrics,
        ),
        points,
    )


def fresh(folder: Path) -> Path:
    """The folder, made. Raises ValueError where a bench is in it."""
    if (folder / result.BENCH).exists() or (folder / result.REQUESTS).exists():
        raise ValueError(f"{folder} holds a bench already; name another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def foretell(
    console: Console, subject: Subject, suite: WorkloadFile, steps: Sequence[run.RunStep], variants: int, seed: int
) -> None:
    """Say what is about to happen, how long it will take, and how small an effect it can find."""
    engine = subject.engine
    console.print(
        f"{engine.model} at {engine.url}: vLLM {engine.version or 'of an unknown version'}, context"
        f" {engine.max_model_len or '?'}; seed {seed}"
    )
    seconds: float | None = 0.0
    counts = Counter((step.workload.name, step.point) for step in steps)
    for each in suite.workloads:
        times = await run.probe(subject, each, seed)
        for point in (point for name, point in counts if name == each.name):
            runs = counts[each.name, point] // variants
            expected = workload.expected_seconds(each, point, *times) if times else None
            seconds = None if seconds is None or expected is None else seconds + expected * runs * variants
            long = f", about {expected:.0f} s each" if expected else ""
            console.print(
                f"  {each.name} {point.label}: {runs} runs of {workload.requests_of(each, point)} requests"
                + (f" x {variants} variants" if variants > 1 else "")
                + long
            )
    smallest = smallest_effect(min(counts.values()) // variants)
    found = (
        f"minimum detectable effect at 8 % run-to-run CV and 80 % power: {100 * (smallest - 1):.0f} %"
        if smallest
        else "fewer than six runs of a variant give no verdict"
    )
    took = (
        "the first request got no answer, so the duration is unknown"
        if seconds is None
        else (
            f"about {seconds:.0f} s of load, estimated from one request; starts of engines come on top"
            if seconds < 120
            else f"about {seconds / 60:.0f} min of load, estimated from one request; starts of engines come on top"
        )
    )
    console.print(f"{took}; {found}")


class Screen:
    """Progress display: one line that moves on a terminal, one line for each run elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(get_renderable=self._line, console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )
        self._now = ""
        self._asked = self._done = self._failed = 0
        self._first_ms: deque[float] = deque(maxlen=200)
        self._began = time.monotonic()

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def run(self, number: int, of: int, variant: str, workload: Workload, point: LoadLevel, asked: int) -> None:
        self._now, self._asked, self._done, self._failed = (
            f"run {number} of {of}: {workload.name} {point.label} on {variant}",
            asked,
            0,
            0,
        )
        self._began = time.monotonic()
        self._first_ms.clear()

    def done(self, done: Done) -> None:
        self._done += 1
        self._failed += done.record.outcome != "ok"
        if done.record.ttft_ms is not None:
            self._first_ms.append(done.record.ttft_ms)

    def ended(self, run: Run) -> None:
        figures = ", ".join(f"{name} {number(run.figures[name])}" for name in FIGURES[:6] if name in run.figures)
        failed = f"; {run.asked - run.ok} of {run.asked} failed" if run.ok < run.asked else ""
        self._console.print(Text(f"{self._now}: {figures}{failed}" + (f" ({run.cut})" if run.cut else "")))

    def _line(self) -> Text:
        seconds = max(1e-3, time.monotonic() - self._began)
        first_ms = sorted(self._first_ms)  # of the latest requests
        ttft = f", TTFT {first_ms[len(first_ms) // 2]:.0f} ms" if first_ms else ""
        failed = f", {self._failed} failed" if self._failed else ""
        return Text(f"{self._now}: {self._done} of {self._asked}, {self._done / seconds:.1f}/s{ttft}{failed}")


def measured(bencher: run.Bencher, screen: Screen) -> Bench:
    """Runs it; Ctrl-C ends it early and keeps what there is."""
    with screen:
        return wait(bencher.go())


def show(console: Console, found: Bench, metrics: Sequence[str]) -> None:
    """The middle run of each load, with the lowest and the highest."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for each in found.runs:
        if each.cut is None:
            groups.setdefault((each.workload, each.point, each.variant), []).append(each)
    bands = {each["name"]: each["expected_hit"] for each in found.workloads if each.get("expected_hit")}
    for (name, point, variant), runs in groups.items():
        table = Table(title=Text(f"{name} {point} on {variant}, {len(runs)} runs"), title_justify="left")
        for column in ("figure", "median", "lowest", "highest"):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for figure, values in sorted(by_figure(runs).items()):
            if not metrics or figure.rpartition(":")[2].partition(".")[0] in metrics:
                middle, low, high = values
                table.add_row(figure + expected(figure, bands.get(name)), number(middle), number(low), number(high))
        console.print(table)
    for caveat in dict.fromkeys((*found.caveats, *(caveat for each in found.runs for caveat in each.caveats))):
        console.print(Text(f"note: {caveat}"))
    if found.scale != 1:
        console.print(f"note: every length was multiplied by {found.scale:g}")
    if found.cut:
        console.print(Text(f"NOT WHOLE: {found.cut}"))


def by_figure(runs: Sequence[Run]) -> Mapping[str, tuple[float, float, float]]:
    """Median, lowest and highest of each figure."""
    found = {}
    for figure in {name for each in runs for name in each.figures}:
        values = sorted(each.figures[figure] for each in runs if figure in each.figures)
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        found[figure] = middle, values[0], values[-1]
    return found


def expected(figure: str, band: Sequence[float] | None) -> str:
    return f" (expected {100 * band[0]:.0f} to {100 * band[1]:.0f} %)" if band and figure == "hit_ratio" else ""


def number(value: float) -> str:
    """With as many digits as mean something."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

"""`vllm-watch tune`, `compare` and `report`: options, and the tables in the terminal."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exporters.accounting.prices import Prices
from exporters.events import log as events
from exporters.requests.read import ReadReport, read_records
from exporters.text import write_atomically
from stack import config
from stack.bench import result, run
from stack.bench.workload import WorkloadFile, slo_of
from stack.cli.bench import NO_LIMIT, SEED_HELP, Screen, chosen, foretell, fresh, page_console, show, wait
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors
from stack.cli.events import EventLogOptions, log_of
from stack.cli.options import DATA, LIMITS, duration
from stack.cli.struct_options import options_of
from stack.gateway import teams
from stack.request_source import data_reader
from stack.root import version
from stack.tuning import experiment, lab_rows, live, report, samples, turns
from stack.tuning.annotate import EventLog
from stack.tuning.comparison import BadComparison, Comparison, table_rows
from stack.tuning.experiment import Engines, Experiment
from stack.tuning.gates import Limits, gates
from stack.tuning.saved_benches import compare_saved, variants_of

VERDICTS = "verdicts.json"


def _share(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """`15%` as 0.15; a number without the sign is a per cent as well."""
    if text is None:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise click.BadParameter(f"{text!r} is no number of per cent, such as 15%")
    return share


ADJUSTED = "drift-adjusted change"
COLOURS = {"better": "green", "worse": "red", "equivalent": "cyan"}


@click.command("tune")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Output folder.  [default: tune-FILE-TIME]"
)
@click.option(
    "--runs", type=click.IntRange(1, 1000), help="Runs of each variant at each load; a verdict needs at least six."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with an API key for the engines, sent as bearer token.",
)
@click.option("--seed", type=int, help=SEED_HELP)
@options_of(EventLogOptions, "event_log")
@AS_JSON
def tune_command(
    file: Path,
    out: Path | None,
    runs: int | None,
    api_key_file: Path | None,
    seed: int | None,
    event_log: EventLogOptions,
    as_json: bool,
) -> None:
    """Run an experiment: compare engine configurations.

    FILE names the workload and the variants; see docs/guides/tuning.md. Where a log of events is named, or a lab runs
    here, the experiment is written there as a region with its verdict. Ctrl-C keeps what was measured. Exit 1 when it
    broke off.

    \b
    Example:  vllm-watch tune prefix-caching.yaml --out prefix-caching
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with mistakes_as_errors():
        its, suite = experiment.load(file)
        its = msgspec.structs.replace(its, runs=runs) if runs else its
        log = _events(event_log)
        key = api_key_file.read_text().strip() if api_key_file else None
        seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        folder = fresh(out or Path(f"tune-{file.stem}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"))
        bench = wait(_tune(console, its, suite, folder, key, seed))
        comparisons = experiment.compare(its, bench)
        write_atomically(folder / VERDICTS, msgspec.json.format(msgspec.json.encode(comparisons), indent=1) + b"\n")
        if log and bench.runs:
            bench = msgspec.structs.replace(bench, events=(log.record(experiment.event(bench, comparisons)).event.id,))
            result.write(folder, bench)
    if as_json:
        click.echo(json_text({"bench": msgspec.to_builtins(bench), "judgements": msgspec.to_builtins(comparisons)}))
    else:
        console = page_console()
        show(console, bench, suite.metrics)
        for each in comparisons:
            show_comparison(console, each)
        click.echo(f"written to {folder}")
    raise SystemExit(1 if bench.cut else 0)


def _events(asked: EventLogOptions) -> EventLog | None:
    """The log of events that is meant, if any."""
    try:
        return log_of(asked)
    except click.UsageError:
        if asked.path or asked.sidecar_url or asked.sidecar_token_file:
            raise
        return None


async def _tune(
    console: Console, its: Experiment, suite: WorkloadFile, folder: Path, key: str | None, seed: int
) -> result.Bench:
    async with Engines(its, folder, lambda words: console.print(Text(words)), key) as engines:
        names = list(its.variants)
        drawn = turns.draw(run.rounds_of(suite.workloads, its.runs), names, random.Random(f"{seed} order"))  # noqa: S311 (nothing secret)
        first = names[0] if (its.order or suite.workloads[0].order) == "sequential" else drawn[0][0]
        contexts = []
        # the variant of the first run last, so that its engine is up
        for name in sorted(names, key=lambda name: name == first):
            subject = await engines.subject(name)
            contexts.append(subject.engine.max_model_len or NO_LIMIT)
        suite, points = chosen(suite, its.only, min(contexts), its.scale, its.requests)
        caveats = list(experiment.caveats(its, engines))
        for caveat in caveats:
            console.print(Text(f"  {caveat}"))
        steps = run.schedule(suite.workloads, points, drawn, its.runs, its.side_by_side)
        order = its.order or suite.workloads[0].order
        if order == "sequential":
            steps.sort(key=lambda step: names.index(step.variant))
        await foretell(console, subject, suite, steps, len(names), seed)
        with Screen(console) as screen:
            bencher = run.Bencher(
                folder, its.title or suite.workloads[0].name, f"vllm-watch {version()}", suite.workloads, steps,
                engines.subject, screen, seed,
                names=names, order=order, scale=its.scale or 1.0, starts=lambda name: engines.starts.get(name, ()),
                caveats=dict.fromkeys(caveats),
            )  # fmt: skip
            return await bencher.go()


def show_comparison(console: Console, found: Comparison) -> None:
    """The verdicts, why where that is no matter of figures, and what to know."""
    table = Table(
        title=Text(f"{found.workload} {found.point}: {found.b} compared with {found.a}"), title_justify="left"
    )
    for column in ("", found.a, found.b, ADJUSTED, "95 % interval", "p", "verdict"):
        table.add_column(Text(column), justify="right" if column in (found.a, found.b, ADJUSTED, "p") else "left")
    rows = [row for row in table_rows(found) if row.verdict != "no verdict"]
    for row in rows:
        table.add_row(*(Text(cell, style=COLOURS.get(row.verdict.split(" ")[0], "")) for cell in row[:-1]))
    console.print(table)
    console.print(
        f"{found.a} and {found.b}: medians over runs. Drift-adjusted change: linear drift over the runs is removed."
    )
    for row in rows:
        if row.verdict.startswith("inconclusive"):
            console.print(Text(f"{row.metric}: {row.why}"))
    for check in found.checks:
        if not check.ok:
            console.print(Text(f"check {check.name}: {check.what}", style="yellow"))
    if not found.controlled:
        console.print(
            Text("uncontrolled: other changes of the same time are not separated from this one", style="yellow")
        )


@click.command("compare")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--exclude-run",
    "excluded",
    multiple=True,
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Exclude a run by its number; repeatable.",
)
@click.option("--event", "event_id", metavar="ID", help="Compare live traffic before and after this tuning event.")
@click.option(
    "--variant",
    "variants",
    nargs=2,
    metavar="A B",
    help="Two variants: of one bench, of two benches, or with --log of a canary.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Request log; repeatable.",
)
@DATA
@click.option(
    "--events", "events_path", type=click.Path(path_type=Path, dir_okay=False), help="Events file, with --event."
)
@click.option(
    "--window",
    "window_s",
    metavar="TIME",
    callback=duration,
    default="4h",
    show_default=True,
    help="With --event: time range on each side.",
)
@click.option(
    "--max-p95-regression", metavar="PERCENT", callback=_share, help="Exit 3 if a p95 is worse by more, such as 15%."
)
@click.option(
    "--max-error-rate",
    metavar="PERCENT",
    callback=_share,
    help="Exit 3 if the error ratio of B is higher, such as 0.5%.",
)
@AS_JSON
def compare_command(
    folders: tuple[Path, ...],
    excluded: tuple[int, ...],
    event_id: str | None,
    variants: tuple[str, str] | None,
    logs: tuple[Path, ...],
    data: str | None,
    events_path: Path | None,
    window_s: float,
    max_p95_regression: float | None,
    max_error_rate: float | None,
    as_json: bool,
) -> None:
    """Compare two benchmark runs or live periods.

    Two benches that were run one after the other are compared with the caveat that nothing was interleaved. Around an
    event, a log that reaches back for some days, to the same hours, finds far more. Exit 3 when a gate is not kept.

    \b
    Example:  vllm-watch compare bench-before bench-after --max-p95-regression 15%
    """
    with mistakes_as_errors():
        if sum(map(bool, (folders, logs, data))) != 1:
            raise click.UsageError("give one or two folders of benches, or --log or --data with --event or --variant")
        if excluded and len(folders) != 1:
            raise click.UsageError("--exclude-run goes with the folder of one bench: runs of two have the same numbers")
        if event_id and folders:
            raise click.UsageError("--event goes with --log or --data, not with folders of benches")
        found = (
            _live(logs, data, event_id, variants, events_path, window_s)
            if not folders
            else compare_saved(folders, variants, excluded)
        )
        limits = Limits(max_p95_regression, max_error_rate)
        broken = [violation for each in found for violation in gates(each, limits)]
    if as_json:
        click.echo(json_text({"judgements": msgspec.to_builtins(found), "broken": msgspec.to_builtins(broken)}))
    else:
        console = page_console()
        for each in found:
            show_comparison(console, each)
            for finding in () if folders else each.findings:
                console.print(Text(f"{finding.metric.title}: {live.consistent(finding)}"))
            for caveat in (caveat for caveat in each.caveats if caveat not in {check.what for check in each.checks}):
                console.print(Text(f"note: {caveat}"))
        for violation in broken:
            console.print(Text(f"GATE {violation.limit}: {violation.what}", style="red"))
    raise SystemExit(3 if broken else 0)


def _live(
    logs: Sequence[Path],
    data: str | None,
    event_id: str | None,
    variants: tuple[str, str] | None,
    events_path: Path | None,
    window_s: float,
) -> list[Comparison]:
    """Traffic that was there anyhow. Raises BadComparison and OSError."""
    if (event_id is None) == (variants is None):
        raise click.UsageError("with --log or --data, say either --event ID or --variant A B")
    if variants is not None:
        read = data_reader(data) if data else None
        return [live.between_variants(samples.read_samples(logs, read=read), *variants)]
    if events_path is None:
        raise click.UsageError("--event needs the file of events: --events FILE")
    recorded = {event.id: event for event in events.read(events_path)[0]}
    if event_id not in recorded:
        raise BadComparison(
            f"{events_path} holds no event {event_id}; `vllm-watch events --events {events_path}` lists them"
        )
    at_s = recorded[event_id].at_s
    others = [event.at_s for event in recorded.values() if event.id != event_id]
    spans = live.spans_around(at_s, window_s)
    read = data_reader(data, min(start for start, _ in spans), max(end for _, end in spans)) if data else None
    found = samples.read_samples(logs, spans, read=read)
    return [live.around_event(found, at_s, window_s, other_events_s=others)]


@click.command("report")
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help=("HTML file; .md, .csv and .json are written beside it.  [default: FOLDER/report.html]"),
)
@click.option(
    "--events",
    "events_path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Events file, to show its events.",
)
@click.option(
    "--prices",
    "prices_path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="prices.yaml, for the cost of GPU hours and of an API.",
)
@click.option("--gpus", type=float, help="GPUs of each variant's engine, for the cost.")
@click.option("--gpu-name", help="GPU model, if prices differ by model.")
@LIMITS
@click.option("--lab", is_flag=True, help="Add the seven pass criteria of the course lab.")
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --lab: request log of the gateway.",
)
@DATA
@click.option(
    "--teams",
    "teams_path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --lab: teams.yaml of the gateway.",
)
def report_command(
    folder: Path,
    out: Path | None,
    events_path: Path | None,
    prices_path: Path | None,
    gpus: float | None,
    gpu_name: str | None,
    limits: tuple[str, ...],
    lab: bool,
    logs: tuple[Path, ...],
    data: str | None,
    teams_path: Path | None,
) -> None:
    """Write a report of a benchmark or an experiment.

    \b
    Example:  vllm-watch report prefix-caching -o report.html --lab
    """
    with mistakes_as_errors():
        page = out or (folder if folder.is_dir() else folder.parent) / "report.html"
        if (beside := page.name.removesuffix(".html") + ".json") in (result.BENCH, VERDICTS):
            raise ValueError(
                f"{page} would bring a {beside} with it, which is the name of a bench's own file; give another name"
                " with -o"
            )
        comparisons = _verdicts(folder)
        material = report.gather(
            folder,
            slo_of(limits),
            comparisons=comparisons,
            events=events.read(events_path)[0] if events_path else (),
            prices=config.load(prices_path, Prices).at(time.time()) if prices_path else None,
            gpus=gpus,
            gpu_name=gpu_name,
        )
        if logs and data:
            raise click.UsageError("choose --log or --data")
        bench = material.bench
        read = data_reader(data, bench.started_s, bench.ended_s) if data else partial(read_records, logs)
        left_out = ReadReport()
        records = list(read(left_out))
        rows = (
            lab_rows.lab_rows(material, log=records, policy=teams.load_policy(teams_path) if teams_path else None)
            if lab
            else []
        )
        written = report.write(material, page, rows)
    for note in left_out.notes:
        click.echo(f"note: {note}", err=True)
    for row in rows:
        click.echo(f"{row.state:13} {row.item}: {row.evidence}")
    click.echo("written: " + ", ".join(map(str, written)))


def _verdicts(folder: Path) -> list[Comparison]:
    """Return the verdicts that `tune` wrote; else compare the variants of the bench. Raises BadBench and ValueError."""
    path = (folder if folder.is_dir() else folder.parent) / VERDICTS
    if path.exists():
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[Comparison])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise result.BadBench(
                f"{path} holds no verdicts of ours: {error}; without it they are worked out anew"
            ) from error
    first, *others = variants_of([result.read(folder)]) or [""]
    found = []
    for other in others:
        with contextlib.suppress(BadComparison):  # a variant that was never run
            found += compare_saved([folder], (first, other))
    return found

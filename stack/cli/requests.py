"""`vllm-watch requests`: find, group and explain requests of a data set or a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exporters.config import meant
from exporters.text import parse_duration, printable, write_atomically
from stack.board.view import moment
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors
from stack.cli.rows import AS_CSV, show_rows
from stack.cli.struct_options import options_of
from stack.option import Opt
from stack.request_source import RequestSourceOptions, require_libraries
from stack.terminal import output_width

LAST_S = 86_400.0  # of a data set, without a time range
BAR = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOptions:
    """Time range. Without one: the last day of a data set, all of a log."""

    since: Annotated[
        str | None, Opt(metavar="TIME", help="Time range until now, such as 1h.  [default: 24h with --data]")
    ] = None
    from_text: Annotated[
        str | None, Opt(name="--from", metavar="TIME", help="Start, such as now-6h or 2026-11-25T14:00.")
    ] = None
    to_text: Annotated[str | None, Opt(name="--to", metavar="TIME", help="End; see --from.")] = None

    def __post_init__(self) -> None:
        if self.since and self.from_text:
            raise ValueError("choose --since or --from")

    def span(self, now_s: float, has_data: bool) -> tuple[float | None, float | None]:
        """Return start and end in unix seconds. Raises ValueError."""
        until_s = moment(self.to_text, now_s) if self.to_text else None
        if self.from_text:
            since_s: float | None = moment(self.from_text, now_s)
        elif self.since:
            since_s = (now_s if until_s is None else until_s) - parse_duration(self.since)
        else:
            since_s = (now_s if until_s is None else until_s) - LAST_S if has_data else None
        if since_s is not None and until_s is not None and since_s >= until_s:
            raise ValueError("the time range ends before it starts")
        return since_s, until_s


def _values(name: str, help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(f"--{name}", name, multiple=True, metavar="NAME", help=f"{help_text}; repeatable.")


_FILTERS = {
    "team": "Only this team",
    "model": "Only this model",
    "outcome": "Only this outcome, such as rejected",
    "reason": "Only this reason",
    "engine": "Only this engine (upstream)",
    "variant": "Only this variant",
    "cluster": "Only this cluster",
}


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, text in reversed(_FILTERS.items()):
        command = _values(name, text)(command)
    return command


@click.group("requests", invoke_without_command=True)
@options_of(RequestSourceOptions, "source")
@options_of(TimeOptions, "when")
@_filters
@click.option("--slowest", metavar="TIME", help="Slowest first, by ttft, tpot, e2e or queue.")
@click.option("--percentiles", is_flag=True, help="Percentiles of the times instead of requests.")
@click.option("--group-by", "group_by", metavar="FIELDS", help="One row for each, such as team,model or hour.")
@click.option("--limit", type=click.IntRange(1, 100_000), help="Rows at most.  [default: 20; 1000 with groups]")
@AS_JSON
@AS_CSV
@click.pass_context
def requests_command(
    context: click.Context,
    /,
    source: RequestSourceOptions,
    when: TimeOptions,
    slowest: str | None,
    percentiles: bool,
    group_by: str | None,
    limit: int | None,
    as_json: bool,
    as_csv: bool,
    **filters: tuple[str, ...],
) -> None:
    """Find, group and explain requests.

    Reads segments of `ship` and lines that are in no segment yet; a request is counted once.

    \b
    Example:  vllm-watch requests --data requests-data --since 1h --team chat --slowest ttft
    """
    with mistakes_as_errors():
        require_libraries()
    if context.invoked_subcommand:
        context.obj = source, when
        return
    if slowest and (percentiles or group_by):
        raise click.UsageError("--slowest lists requests; without it, choose --percentiles or --group-by")
    from exporters.dataset import request_query

    with mistakes_as_errors():
        only = request_query.RequestFilter({name: values for name, values in filters.items() if values})
        with source.open(*when.span(time.time(), source.has_data)) as data:
            if percentiles or group_by:
                fields = [name.strip() for name in (group_by or "").split(",") if name.strip()]
                answer = request_query.percentiles if percentiles else request_query.grouped
                found = answer(data, only, fields, limit or 1000)
            else:
                found = request_query.listed(data, only, slowest, limit or 20)
            if not found.rows and (sentence := only.unknown(data)):
                raise ValueError(sentence)
            notes = data.notes
    show_rows(found.head, found.rows, notes, as_json, as_csv)


@requests_command.command("show")
@click.argument("request_id")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page instead.")
@click.option("--trace-url", metavar="URL", help="URL of a trace, with {trace_id} in it.")
@AS_JSON
@click.pass_obj
def requests_show(
    given: tuple[RequestSourceOptions, TimeOptions],
    request_id: str,
    html: Path | None,
    trace_url: str | None,
    as_json: bool,
) -> None:
    """Show one request as a time line, and why it took that long.

    Options of the data come before `show`.

    \b
    Example:  vllm-watch requests --log requests.jsonl show 3f2a
    """
    source, when = given
    from exporters.dataset.request_story import find_story

    with mistakes_as_errors():
        if trace_url and "{trace_id}" not in trace_url:
            raise ValueError("--trace-url needs {trace_id} in it")
        with source.open(*when.span(time.time(), source.has_data)) as data:
            found = find_story(data, request_id)
            notes = data.notes
        if found is None:
            raise ValueError(f"no request {request_id!r} in this time; widen it with --since, or name more logs")
        trace_id = found.record.trace_id
        link = trace_url.replace("{trace_id}", trace_id) if trace_url and trace_id else None
        if html:
            from stack.board.request_pages import story_file

            write_atomically(html, story_file(found, link))
    if as_json:
        click.echo(json_text({**found.as_json(), "trace": link, "notes": notes}))
    elif html:
        click.echo(f"written: {html}")
    else:
        _draw(found, link, notes)


def _draw(story: Any, link: str | None, notes: list[str]) -> None:
    record = story.record
    console = Console(width=output_width(160), highlight=False)
    named = {
        "team": record.team, "model": record.model, "engine": record.upstream, "variant": record.variant,
        "outcome": record.outcome, "reason": record.reason,
        "unreadable": record.unreadable, "attempt": record.attempt,
    }  # fmt: skip
    click.echo(printable(f"request {record.request_id}, ended {record.ts or 'at an unknown time'}"))
    click.echo(printable(", ".join(f"{name} {value}" for name, value in named.items() if value is not None)))
    total = record.e2e_ms
    if not story.phases:
        click.echo("no time line: the record has no e2e_ms")
    else:
        table = Table(title=f"{total:,.1f} ms", title_justify="left")
        for name, right in (("phase", False), ("", False), ("ms", True), ("share", True), ("meaning", False)):
            table.add_column(name, justify="right" if right else "left", no_wrap=name == "")
        for phase in story.phases:
            share = phase.length_ms / total
            bar = _bar(phase.start_ms / total, share)
            name = phase.name.replace("_", " ")
            table.add_row(name, bar, f"{phase.length_ms:,.1f}", f"{share:.0%}", phase.meaning)
        console.print(table)
        for one in story.blames:
            if one.share >= 0.05:
                console.print(escape(printable(str(one))))
    teams = ", ".join(f"{count} of {team}" for team, count in story.teams.most_common(8))
    click.echo(printable(f"on {story.engine} meanwhile: {len(story.others)} others{teams and f' ({teams})'}"))
    if record.trace_id:
        click.echo(printable(f"trace: {link or record.trace_id}"))
    for note in [*([f"{story.same_id} records have this id; this is the newest"] if story.same_id > 1 else []), *notes]:
        click.echo(f"note: {note}")


def _bar(start: float, share: float) -> str:
    before = min(BAR - 1, round(start * BAR))
    return " " * before + "█" * max(1, min(BAR - before, round(share * BAR)))


@requests_command.command("sql")
@click.argument("sql", required=False)
@click.option("--views", is_flag=True, help="List the views and their columns.")
@click.option("--limit", type=click.IntRange(1), help="Rows at most.")
@AS_JSON
@AS_CSV
@click.pass_obj
def requests_sql(
    given: tuple[RequestSourceOptions, TimeOptions],
    sql: str | None,
    views: bool,
    limit: int | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Run one SELECT over the views, read-only.

    Files, network, extensions and settings are out of reach. Options of the data come before `sql`.

    \b
    Example:  vllm-watch requests --data requests-data sql "SELECT team, sum(requests) FROM traffic GROUP BY team"
    """
    if bool(sql) == views:
        raise click.UsageError("give one SELECT, or --views")
    from exporters.dataset import query, sql_guard

    if sql is None:
        described = query.describe_views()
        if as_json or as_csv:
            show_rows(("view", "column", "type", "meaning"), described, (), as_json, as_csv)
        else:
            for name, meaning in dict.fromkeys((view, meaning) for view, _, _, meaning in described):
                columns = [f"{column} {kind}" for view, column, kind, _ in described if view == name]
                click.echo(f"{name}: {meaning}\n    {', '.join(columns)}")
        return
    source, when = given
    with mistakes_as_errors(), source.open(*when.span(time.time(), source.has_data)) as data:
        found = sql_guard.run(data, sql, limit)
        notes = data.notes
    show_rows(found.head, found.rows, notes, as_json, as_csv)


@requests_command.command("ddl")
@click.argument("engine", type=click.Choice(["clickhouse", "trino", "athena"]))
@click.argument("location")
@click.option("--endpoint", metavar="URL", help="URL of an S3-compatible store, for ClickHouse.")
def requests_ddl(engine: str, location: str, endpoint: str | None) -> None:
    """Print SQL with which another engine reads a data set.

    LOCATION is a folder or s3://bucket/prefix as that engine sees it.

    \b
    Example:  vllm-watch requests ddl clickhouse s3://logs/requests | clickhouse-client --multiquery
    """
    from exporters.dataset import engine_sql

    with mistakes_as_errors():
        if engine == "clickhouse":
            statements = list(engine_sql.clickhouse(location, endpoint))
        else:
            statements = list((engine_sql.trino if engine == "trino" else engine_sql.athena)(location))
    click.echo("\n\n".join(f"{statement};" for statement in statements))


@requests_command.command("sink")
@click.argument("name")
def requests_sink(name: str) -> None:
    """Print how to send request lines to another system.

    NAME is clickhouse, kafka, nats or loki. Delivery is at least once; request_id is the key.

    \b
    Example:  vllm-watch requests sink kafka
    """
    from exporters.dataset.sinks import SINKS

    with mistakes_as_errors():
        if name not in SINKS:
            raise ValueError(f"there is no recipe for {name!r}{meant(name, SINKS)}")
    click.echo(SINKS[name](), nl=False)


@requests_command.command("dashboard")
@click.option("--database", default="vllm_watch", show_default=True, metavar="NAME", help="Database of the views.")
def requests_dashboard(database: str) -> None:
    """Print a Grafana dashboard for the ClickHouse data source.

    It reads the views of `requests ddl clickhouse`.

    \b
    Example:  vllm-watch requests dashboard > requests.json
    """
    from dashboards.clickhouse_requests import dashboard

    with mistakes_as_errors():
        made = dashboard(database)
    click.echo(json_text(made))

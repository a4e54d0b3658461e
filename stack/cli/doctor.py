"""`vllm-watch doctor`: bottleneck, evidence, first option to change."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import click
import msgspec

from alerts.settings import Settings
from exporters.catalogue import exposition_parser
from exporters.catalogue.exposition_parser import BadExposition, Exposition
from exporters.engine.client import scrape_engine
from exporters.net.http_client import HttpClientConfig
from exporters.net.prometheus import Address, Prometheus, PrometheusError, address_from
from exporters.requests.read import ReadReport
from exporters.text import format_duration, parse_duration
from stack.cli.common import AS_JSON, UsageMistake, json_text, mistakes_as_errors
from stack.cli.options import ENGINE_URL, HTTP_CONFIG, PROMETHEUS_URL, THRESHOLDS, TOKEN_FILE, USER_FILE, settings_of
from stack.cli.scraped import text_of
from stack.cli.struct_options import options_of
from stack.doctor import advice, collect, report, series
from stack.doctor.diagnose import diagnose, ranked, serious, undecided
from stack.doctor.matrix.symptom import ANYWHERE, EvidenceSource
from stack.doctor.series import Pages, SeriesWindow, gauges_of
from stack.option import Opt
from stack.tuning.samples import Span

LOOK_S, LOOKS = 2.0, 60  # gauges between two looks: so often, and never more in all


def _typed(seconds: float) -> str:
    return format_duration(round(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `vllm-watch doctor`."""

    for_s: Annotated[
        float,
        Opt(
            name="--for", metavar="TIME", read=parse_duration, write=_typed, help="Time between the two scrapes of URL."
        ),
    ] = 30.0
    gateway_urls: Annotated[
        tuple[str, ...],
        Opt(name="--gateway", metavar="URL", help="With URL: metrics address of a gateway; repeatable."),
    ] = ()
    prometheus_url: Annotated[
        str | None, Opt(name="--prometheus", metavar="URL", help="URL of a Prometheus to query instead.")
    ] = None
    window_s: Annotated[
        float,
        Opt(
            name="--window",
            metavar="TIME",
            read=parse_duration,
            write=_typed,
            help="With --prometheus: time range to read.",
        ),
    ] = 900.0
    model: Annotated[str | None, Opt(metavar="NAME", help="Only this model (label model_name).")] = None
    before: Annotated[
        Path | None, Opt(file=True, exists=True, help="Saved exposition of an engine; with --after and --seconds.")
    ] = None
    after: Annotated[Path | None, Opt(file=True, exists=True, help="Later exposition of the same engine.")] = None
    gateway_before: Annotated[
        Path | None, Opt(file=True, exists=True, help="Saved exposition of the gateway; with --before.")
    ] = None
    gateway_after: Annotated[
        Path | None, Opt(file=True, exists=True, help="Later exposition of the gateway; with --after.")
    ] = None
    seconds: Annotated[float | None, msgspec.Meta(ge=0.1), Opt(help="Seconds between the two.")] = None
    logs: Annotated[
        tuple[Path, ...],
        Opt(name="--log", file=True, exists=True, help="Request log of the same time, also .gz; repeatable."),
    ] = ()
    words: Annotated[
        str | None, Opt(name="--workload", metavar="WORDS", help=f"Print what to expect of a workload: {advice.NAMES}.")
    ] = None
    goal: Annotated[
        str | None,
        Opt(choices=tuple(one.name for one in advice.GOALS), help="Print the first two options to change for a goal."),
    ] = None
    thresholds: Annotated[Path | None, THRESHOLDS] = None
    token_file: Annotated[Path | None, TOKEN_FILE] = None
    user_file: Annotated[Path | None, USER_FILE] = None
    http_config: Annotated[Path | None, HTTP_CONFIG] = None


@click.command("doctor")
@click.argument("urls", nargs=-1, metavar="[URL]...")
@options_of(DoctorOptions, "asked")
@AS_JSON
def doctor_command(urls: tuple[str, ...], asked: DoctorOptions, as_json: bool) -> None:
    """Find the bottleneck of a running engine.

    Reads an engine twice (URL, one or several), a Prometheus, or two saved pages; a request log adds what clients saw.
    Without any of these: VLLM_WATCH_PROMETHEUS_URL, else VLLM_WATCH_ENGINE_URL (one or several, with blanks between).
    See docs/guides/doctor.md. Exit 1 when a finding is serious, 2 for a mistake, 3 when an engine may stand still and
    the look was too short to be sure.

    \b
    Example:  vllm-watch doctor --prometheus http://127.0.0.1:9090 --window 15m
              vllm-watch doctor http://127.0.0.1:8000 --for 30s --log requests.jsonl
              vllm-watch doctor --before before.prom --after after.prom --seconds 30
              vllm-watch doctor --workload rag
    """
    saved = (asked.before, asked.after, asked.seconds)
    if not any((urls, asked.prometheus_url, *saved, asked.words, asked.goal)):
        prometheus_url, engine_urls = os.environ.get(PROMETHEUS_URL), os.environ.get(ENGINE_URL, "")
        asked = dataclasses.replace(asked, prometheus_url=prometheus_url)
        urls = () if prometheus_url else tuple(engine_urls.split())
    ways = [
        bool(urls),
        bool(asked.prometheus_url),
        any(one is not None for one in saved),
        asked.words is not None,
        asked.goal is not None,
    ]
    if sum(ways) != 1:
        raise click.UsageError(
            "name one of: URL, --prometheus URL, --before FILE with --after FILE and --seconds N, --workload WORDS,"
            " --goal NAME"
        )
    if asked.words is not None or asked.goal is not None:
        with mistakes_as_errors():
            answer = (
                report.workload_as_json(asked.words)
                if asked.words is not None
                else report.goal_as_json(asked.goal or "")
            )
        _echo(answer, (report.workload_as_text if asked.words is not None else report.goal_as_text)(answer), as_json)
        return
    if any(ways[2:3]) and not all(one is not None for one in saved):
        raise click.UsageError("saved pages are --before FILE, --after FILE and --seconds N, all three")
    if (
        bool(asked.gateway_before) != bool(asked.gateway_after)
        or (asked.gateway_before and not asked.before)
        or (asked.gateway_urls and not urls)
    ):
        raise click.UsageError(
            "--gateway goes with URL; --gateway-before and --gateway-after go together, with --before and --after"
        )
    if bare := next((url for url in (*urls, *asked.gateway_urls) if "://" not in url), None):
        raise click.UsageError(f"{bare} is no address; write it like http://127.0.0.1:8000")
    if asked.for_s <= 0 or asked.window_s <= 0 or (asked.seconds is not None and not math.isfinite(asked.seconds)):
        raise click.UsageError("--for, --window and --seconds are times longer than 0, such as 30s")
    its = [f"--model {shlex.quote(asked.model)}"] if asked.model else []
    with mistakes_as_errors():
        settings, spans = settings_of(asked.thresholds), list[Span]()
        if asked.prometheus_url:
            where = address_from(asked.prometheus_url, asked.token_file, asked.user_file, asked.http_config)
            named = (
                ("token-file", asked.token_file),
                ("user-file", asked.user_file),
                ("http-config", asked.http_config),
            )
            files = [f"--{name} {shlex.quote(str(path))}" for name, path in named if path]
            again = ["--prometheus", where.shown, *files, "--window", format_duration(round(asked.window_s)), *its]
            found, span = asyncio.run(_recorded(where, asked.window_s, asked.model))
            spans.append(span)
        elif urls:
            urls, gateway_urls = (
                tuple(dict.fromkeys(url.rstrip("/") for url in given)) for given in (urls, asked.gateway_urls)
            )
            files = [f"--http-config {shlex.quote(str(asked.http_config))}"] if asked.http_config else []
            again = [*urls, *(f"--gateway {url}" for url in gateway_urls), *files, "--for", f"{asked.for_s:g}s", *its]
            found, span = asyncio.run(
                _looked(
                    urls, gateway_urls, asked.for_s, HttpClientConfig(asked.http_config) if asked.http_config else None
                )
            )
            spans.append(span)
        else:
            again = ["--before", "BEFORE", "--after", "AFTER", "--seconds", f"{asked.seconds:g}", *its]
            found = _saved(
                [(asked.before, asked.after), (asked.gateway_before, asked.gateway_after)], asked.seconds or 0.0
            )
        log = " ".join(f"--log {shlex.quote(str(path))}" for path in asked.logs) or ANYWHERE.log
        _say(
            found,
            asked.logs,
            spans,
            asked.model,
            settings,
            EvidenceSource(" ".join(("vllm-watch doctor", *again)), log),
            as_json,
        )


def _echo(answer: Mapping[str, Any], text: str, as_json: bool) -> None:
    """In a terminal no wider than that; what goes into a file or a pipe keeps its lines."""
    click.echo(
        json_text(answer) if as_json else report.folded(text, shutil.get_terminal_size((0, 0)).columns), nl=as_json
    )


def _say(
    found: SeriesWindow,
    logs: Sequence[Path],
    spans: Sequence[Span],
    model: str | None,
    settings: Settings,
    asked: EvidenceSource,
    as_json: bool,
) -> None:
    """Prints, and exits."""
    left_out = ReadReport()
    records = collect.records_of(logs, spans, left_out) if logs else None
    for note in left_out.notes:
        click.echo(f"note: {note}", err=True)
    diagnoses = [diagnose(one, settings) for one in collect.evidence(found, records, model)]
    _echo(report.as_json(diagnoses, found.source, asked), report.as_text(diagnoses, found.source, asked), as_json)
    raise SystemExit(1 if serious(ranked(diagnoses)) else 3 if undecided(diagnoses) else 0)


async def _recorded(where: Address, window_s: float, model: str | None) -> tuple[SeriesWindow, Span]:
    """From Prometheus. Raises OSError when it does not answer."""
    now_s = time.time()
    try:
        async with Prometheus(where) as prometheus:
            return await series.over(prometheus, window_s, now_s, model), (now_s - window_s, now_s)
    except PrometheusError as error:
        raise UsageMistake(str(error)) from None


async def _looked(
    urls: Sequence[str], gateway_urls: Sequence[str], for_s: float, way: HttpClientConfig | None = None
) -> tuple[SeriesWindow, Span]:
    """Look at each source twice, and at gauges and progress now and then. An engine that stops answering is evidence,
    and so is a gateway that does not answer while another does. Raises OSError where the first look at an engine fails,
    where the last one is refused, or where no gateway answers; ValueError for a gateway that is none."""
    engines, gateways = [_Looks(url, way) for url in urls], [_Looks(url, way) for url in gateway_urls]
    lost: dict[str, str] = {}
    began_s = time.time()
    await asyncio.gather(*(source.look() for source in engines), _look_at(gateways, lost))
    for source in gateways:
        Pages(source.url, source.last, source.last).of_gateway()
    click.echo(f"looking for {for_s:g} s at {', '.join(source.url for source in (*engines, *gateways))}", err=True)
    every_s = max(LOOK_S, for_s / LOOKS)
    while (left_s := began_s + for_s - time.time()) > every_s:
        await asyncio.sleep(every_s)
        # one that fails is one less
        await asyncio.gather(*(source.look() for source in (*engines, *gateways)), return_exceptions=True)
    await asyncio.sleep(max(left_s, 0.0))
    await _look_at(gateways, lost)
    failed = await asyncio.gather(*(source.look() for source in engines), return_exceptions=True)
    for error in failed:
        if isinstance(error, BaseException) and not isinstance(error.__cause__, TimeoutError):
            raise error
    ended_s = time.time()
    pages = [source.pages(began_s, ended_s if error else 0.0) for source, error in zip(engines, failed, strict=True)]
    pages += [source.pages(began_s, 0.0) for source in gateways]
    about = f"{', '.join(urls)}, {ended_s - began_s:.0f} s"
    return series.between(pages, ended_s - began_s, about, lost), (began_s, ended_s)


async def _look_at(gateways: list[_Looks], lost: dict[str, str]) -> None:
    """Look at each gateway; those that do not answer move to `lost`, with the reason. Raises OSError where none is
    left."""
    failed = await asyncio.gather(*(source.look() for source in gateways), return_exceptions=True)
    errors = [error for error in failed if isinstance(error, BaseException)]
    if errors and (len(errors) == len(gateways) or not all(isinstance(error, OSError) for error in errors)):
        raise errors[0]
    for source, error in zip(list(gateways), failed, strict=True):
        if error:
            lost[_instance(source.url)] = str(error)
            gateways.remove(source)


class _Looks:
    """Looks at one source: the first and the latest page, and of those between them what changes from look to look."""

    def __init__(self, url: str, way: HttpClientConfig | None) -> None:
        self.url, self._way = url, way
        self._seen: list[tuple[float, Exposition]] = []
        self.first = self.last = Exposition()

    async def look(self) -> None:
        """Read the page. Raises OSError, from a TimeoutError where a connection was accepted and no answer came."""
        self.last = await _page(self._way, self.url)
        self.first = self.first if self._seen else self.last
        self._seen.append((time.time(), gauges_of(self.last)))

    def pages(self, began_s: float, silent_until_s: float) -> Pages:
        """Return what was read. silent_until_s: when the last look failed, 0 where it did not."""
        inside, (last_s, _) = self._seen[1:-1], self._seen[-1]
        silent_s = max(silent_until_s - last_s, 0.0)
        return Pages(
            _instance(self.url),
            self.first,
            self.last,
            [page for _, page in inside],
            [at - began_s for at, _ in inside],
            silent_s,
        )


async def _page(way: HttpClientConfig | None, url: str) -> Exposition:
    return exposition_parser.parse((await scrape_engine(url, http_config=way))[0])


def _instance(url: str) -> str:
    return urlsplit(url).netloc or url


def _read(path: Path) -> Exposition:
    """A saved page. Raises ValueError and OSError."""
    try:
        return exposition_parser.parse(text_of(path))
    except BadExposition as error:
        raise BadExposition(f"{path}: {error}") from None


def _saved(pairs: Sequence[tuple[Path | None, Path | None]], seconds: float) -> SeriesWindow:
    """Raises ValueError and OSError."""
    sources, named = list[Pages](), list[str]()
    for first, second in pairs:
        if first and second:
            pages = Pages(str(second), _read(first), _read(second)).checked()
            sources.append(pages.of_gateway() if sources else pages)
            named.append(f"{first} and {second}")
    return series.between(sources, seconds, f"{named[0]}, {seconds:g} s apart")

"""`vllm-watch golden`: record, check."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import msgspec

from exporters.engine.golden_state import GoldenResult, GoldenVerdict, keep_result, read_states
from exporters.net.http_client import HttpClientConfig
from exporters.text import parse_duration, printable
from stack.cli.common import AS_JSON, UsageMistake, json_text, mistakes_as_errors
from stack.cli.options import ENGINE_URL, HTTP_CONFIG
from stack.cli.struct_options import options_of
from stack.gateway.config import read_key
from stack.golden import baseline as baselines
from stack.golden import prompts, schedule
from stack.golden.baseline import Baseline, GoldenError
from stack.golden.check import check_engine
from stack.golden.client import CHAT, COMPLETIONS
from stack.golden.record import RecordPlan, record
from stack.option import Opt

_ROUTES = {"completions": COMPLETIONS, "chat": CHAT}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenAccess:
    """Options for reaching the engine, and for the record of what it was sent."""

    api_key_file: Annotated[
        Path | None, Opt(file=True, help="File with an API key for the engine, sent as bearer token.")
    ] = None
    http_config: Annotated[Path | None, HTTP_CONFIG] = None
    probe_log: Annotated[
        Path | None,
        Opt(file=True, metavar="FILE", help="Append a record of each request; for requests_log of the sidecar."),
    ] = None

    @property
    def key(self) -> str | None:
        return read_key(self.api_key_file, "--api-key-file") if self.api_key_file else None

    @property
    def client_config(self) -> HttpClientConfig | None:
        return HttpClientConfig(self.http_config) if self.http_config else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenSchedule:
    """Options of repeated checks."""

    every_s: Annotated[
        float | None, Opt(name="--every", metavar="TIME", read=parse_duration, help="Repeat the check, such as 1h.")
    ] = None
    tokens_per_hour: Annotated[
        int, msgspec.Meta(ge=1), Opt(metavar="N", help="With --every: most tokens that all checks use in an hour.")
    ] = 100_000


BASELINE = click.option(
    "--baseline", "path", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File of the baseline."
)


@click.group()
def golden() -> None:
    """Record what an engine computes, and check it later."""


@golden.command("record")
@click.argument("url", envvar=ENGINE_URL)
@BASELINE
@click.option("--model", metavar="NAME", help="Served model name, if there are several.")
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with your prompts; see docs/guides/golden.md.  [default: 16 in several languages, digits, code]",
)
@click.option(
    "--runs", type=click.IntRange(12, 240), default=24, show_default=True, help="Runs to learn the noise from."
)
@click.option("--route", type=click.Choice(tuple(_ROUTES)), help="API route.  [default: completions, if offered]")
@click.option("--replace", is_flag=True, help="Replace an existing baseline.")
@options_of(GoldenAccess, "access")
def golden_record(
    url: str,
    path: Path,
    model: str | None,
    prompt_file: Path | None,
    runs: int,
    route: str | None,
    replace: bool,
    access: GoldenAccess,
) -> None:
    """Record the answers of a healthy engine.

    Sends each prompt several times, alone and beside up to 31 other requests, and learns how far its numbers differ
    without damage. Record again after a planned change of model, release, options or GPU.

    \b
    Example:  vllm-watch golden record http://127.0.0.1:8000 --baseline chat.golden.json
    """
    with mistakes_as_errors():
        if path.exists() and not replace:
            raise UsageMistake(f"{path} exists; --replace records over it, or choose another name")
        plan = RecordPlan(prompts=prompts.load(prompt_file), model=model, route=route and _ROUTES[route], runs=runs)
        found = asyncio.run(
            record(
                url,
                plan,
                key=access.key,
                http_config=access.client_config,
                probe_log=access.probe_log,
                progress=lambda line: click.echo(line, err=True),
            )
        )
        baselines.save(path, found, replace=replace)
    click.echo(f"{path}: {recorded(found)}")


def recorded(found: Baseline) -> str:
    """Return what was recorded, in one line."""
    noise = (
        f"noise up to {found.limits.max_abs:.2g} nats" if found.limits.least_sd else "every run equal to the last bit"
    )
    places = sum(len(prompt.alone) for prompt in found.prompts)
    return (
        f"{found.engine.model}, {len(found.prompts)} prompts with {places} log-probabilities, {found.runs} runs,"
        f" {noise}; a check uses {found.tokens} to {schedule.most_tokens(found)} tokens"
    )


@golden.command("check")
@click.argument("urls", nargs=-1, metavar="URL...", envvar=ENGINE_URL)
@BASELINE
@click.option(
    "--result",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that keeps the last result, for `golden` of the sidecar.",
)
@options_of(GoldenSchedule, "timing")
@options_of(GoldenAccess, "access")
@AS_JSON
def golden_check(
    urls: tuple[str, ...], path: Path, result: Path | None, timing: GoldenSchedule, access: GoldenAccess, as_json: bool
) -> None:
    """Compare engines with a baseline.

    Names what differs: tokenizer, chat template, values that are no numbers, dtype, model, numeric damage. Give the
    URL of each engine itself: behind a balancer one check sees one of them. Exit 1 when an engine is not the same, 2
    when one cannot be checked and the others are the same.

    \b
    Example:  vllm-watch golden check http://127.0.0.1:8000 --baseline chat.golden.json
              vllm-watch golden check http://127.0.0.1:8000 --baseline chat.golden.json --every 1h --result golden.json
    """
    if not urls:
        raise click.UsageError("name an engine, such as http://127.0.0.1:8000")
    if timing.every_s is not None and timing.every_s < 1:
        raise click.UsageError("--every is a time of at least 1s, such as 1h")
    results = list[GoldenResult]()
    with mistakes_as_errors():
        baseline, key, http_config = baselines.load(path), access.key, access.client_config
        if result is not None and result.exists():
            read_states(result)

        async def check(url: str) -> GoldenResult:
            return await check_engine(url, baseline, key=key, http_config=http_config, probe_log=access.probe_log)

        def on_result(found: GoldenResult) -> None:
            if result is not None:
                keep_result(result, found, timing.every_s)
            results.append(found)
            if not as_json or timing.every_s is not None:
                click.echo(msgspec.json.encode(found).decode() if as_json else as_text(found))

        if timing.every_s is None:
            complete = asyncio.run(_once(urls, check, on_result))
        else:
            budget = schedule.budget_of(baseline, timing.tokens_per_hour)
            need = schedule.most_tokens(baseline)
            asyncio.run(_repeated(urls, check, timing.every_s, budget, need, on_result))
            return
    if as_json:
        click.echo(json_text([msgspec.to_builtins(found) for found in results]))
    same = all(found.verdict is GoldenVerdict.SAME for found in results)
    raise SystemExit((0 if complete else 2) if same else 1)


def as_text(found: GoldenResult) -> str:
    """Return a result in one line."""
    cause = "" if found.verdict is GoldenVerdict.SAME else f" ({found.cause.replace('_', ' ')})"
    first = f"; first difference: {found.first}" if found.first else ""
    cost = f"{found.tokens} tokens, {found.seconds:.1f} s"
    return printable(f"{found.address} {found.model}: {found.verdict}{cause}: {found.sentence}{first} [{cost}]")


async def _once(urls: tuple[str, ...], check: schedule.Checker, on_result: schedule.OnResult) -> bool:
    """Check each engine; return whether all could be checked."""
    complete = True
    for url in urls:
        try:
            found = await check(url)
        except GoldenError as error:
            complete = False
            click.echo(f"Error: {error}", err=True)
        else:
            on_result(found)
    return complete


async def _repeated(
    urls: tuple[str, ...],
    check: schedule.Checker,
    every_s: float,
    budget: schedule.TokenBudget,
    need: int,
    on_result: schedule.OnResult,
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await schedule.keep_checking(
        urls, check, every_s, budget, need, on_result, lambda line: click.echo(line, err=True), stop
    )

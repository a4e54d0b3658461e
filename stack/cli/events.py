"""`vllm-watch annotate` and `vllm-watch events`: what was changed, when and by whom."""

from __future__ import annotations

import contextlib
import getpass
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec

from exporters.events.log import Kind, ManualKind, NewEvent, TuningEvent, new_id
from stack.cli import common
from stack.cli.common import AS_JSON, json_text, mistakes_told
from stack.cli.options import duration
from stack.lab import install
from stack.tuning import annotate

if TYPE_CHECKING:
    from dashboards import annotation_copies, grafana_client

FILE_VARIABLE = "VLLM_WATCH_EVENTS"
COPIED_S = 30 * 86400.0  # how far back `annotate --grafana` looks for what Grafana lacks

_Command = Callable[..., Any]


def where(command: _Command) -> _Command:
    """The options that say which log of events is meant."""
    for option in (
        click.option(
            "--sidecar-token-file", type=click.Path(path_type=Path), help="The token of its events_token_file."
        ),
        click.option("--sidecar", "sidecar_url", metavar="URL", help="A sidecar elsewhere, which owns its file."),
        click.option(
            "--events",
            "path",
            envvar=FILE_VARIABLE,
            type=click.Path(path_type=Path, dir_okay=False),
            help=f"The file of events; else {FILE_VARIABLE} is read, else that of the lab that runs here.",
        ),
    ):
        command = option(command)
    return command


def _grafana(name: str, text: str) -> Callable[[_Command], _Command]:
    """The options that say which Grafana is to have copies."""

    def added(command: _Command) -> _Command:
        for option in (
            click.option("--user-file", type=click.Path(path_type=Path), help="user:password for Grafana."),
            click.option(
                "--token-file",
                type=click.Path(path_type=Path),
                help="A service account's token for Grafana; else GRAFANA_TOKEN is read.",
            ),
            click.option(name, "grafana_url", metavar="URL", help=text),
        ):
            command = option(command)
        return command

    return added


def _moment(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """A callback: unix seconds of now-10m, 2026-03-01T12:00:00Z or milliseconds."""
    if text is None:
        return None
    from stack.board.view import moment

    try:
        return moment(text, time.time())
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _time(name: str, text: str) -> Callable[[_Command], _Command]:
    return click.option(name, f"{name[2:]}_s", metavar="TIME", callback=_moment, help=text)


@click.command("annotate")
@click.argument("text", required=False)
@click.option("--tag", "tags", multiple=True, metavar="WORD", help="May be given more than once.")
@click.option(
    "--kind",
    type=click.Choice(get_args(ManualKind)),
    default="change",
    show_default=True,
    help="A note starts no comparison and no alert.",
)
@click.option(
    "--diff", "diffs", multiple=True, metavar="OPTION=OLD->NEW", help="What was changed; may be given more than once."
)
@_time("--at", "When: now-10m, 2026-03-01T12:00:00Z or ms; UTC where no zone is named.  [default: now]")
@_time("--from", "A region: when it began.")
@_time("--to", "A region: when it ended.")
@click.option("--open", "is_open", is_flag=True, help="A region that has not ended; it begins --at, else now.")
@click.option("--close", "closed", metavar="ID", help="End an open region, --at or now.")
@click.option("--id", "event_id", metavar="ID", help="A name for it; the same one twice is written once.")
@click.option("--who", metavar="NAME", help="By default the name of the user here.")
@click.option("--upstream", metavar="NAME", help="The engine that it is about, as the sidecar calls it.")
@click.option("--model", metavar="NAME", help="The model that it is about.")
@where
@_grafana("--grafana", "Copy it, and what was not copied in the last 30 days, into this Grafana as annotations.")
@AS_JSON
def annotate_command(
    text: str | None,
    tags: tuple[str, ...],
    kind: ManualKind,
    diffs: tuple[str, ...],
    at_s: float | None,
    from_s: float | None,
    to_s: float | None,
    is_open: bool,
    closed: str | None,
    event_id: str | None,
    who: str | None,
    upstream: str | None,
    model: str | None,
    path: Path | None,
    sidecar_url: str | None,
    sidecar_token_file: Path | None,
    grafana_url: str | None,
    token_file: Path | None,
    user_file: Path | None,
    as_json: bool,
) -> None:
    """Write down what was changed; boards and alerts show it. Prints the id of the event.

    Exit 2 when nothing was written. A Grafana that is away is no failure: its copy is made the next time.

    \b
    Example:  vllm-watch annotate "prefix caching on" --diff 'enable-prefix-caching=off->on' \
                --tag rollout --events events.jsonl
              vllm-watch annotate "canary at 10 %" --open --id canary-7 --events events.jsonl
              vllm-watch annotate --close canary-7 --events events.jsonl
    """
    _refuse_mixtures(text, closed, at_s, from_s, to_s, is_open, (tags, diffs, event_id, who, upstream, model))
    with mistakes_told():
        log, copier = log_of(path, sidecar_url, sidecar_token_file), _client(grafana_url, token_file, user_file)
    if closed:
        with mistakes_told():
            told = log.close(closed, at_s)
    else:
        with mistakes_told():
            new = NewEvent(
                what=text or "", kind=kind, id=event_id or new_id(), at_s=at_s if from_s is None else from_s,
                end_s=to_s, open=is_open,
                who=who or _user(), upstream=upstream, model=model, diff=annotate.differences(diffs), tags=tags,
            )  # fmt: skip
        with _said_again(new), mistakes_told():
            told = log.record(new)
    copies = _copied(copier, log, told.event) if copier else None
    if as_json:
        click.echo(
            json_text(
                {"event": msgspec.to_builtins(told.event), "written": told.written, "copies": copies and asdict(copies)}
            )
        )
        return
    click.echo(told.event.id)
    click.echo(_sentence(told, closed is not None), err=True)
    _say(copies)


@click.command("events")
@click.option(
    "--since", "since_s", metavar="TIME", callback=duration, help="How far back, such as 24h.  [default: all of them]"
)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(get_args(Kind)), help="May be given more than once.")
@where
@_grafana("--copy-to-grafana", "Make the annotations that this Grafana lacks, restarts left out.")
@AS_JSON
def events_command(
    since_s: float | None,
    kinds: tuple[str, ...],
    path: Path | None,
    sidecar_url: str | None,
    sidecar_token_file: Path | None,
    grafana_url: str | None,
    token_file: Path | None,
    user_file: Path | None,
    as_json: bool,
) -> None:
    """What was changed, restarted or noted, the newest last; regions with their end, open ones marked. Times are UTC.

    Exit 1 when Grafana refuses a copy, 2 when it or cannot access the events file.

    \b
    Example:  vllm-watch events --since 24h --kind change --events events.jsonl
    """
    with mistakes_told():
        log, copier = log_of(path, sidecar_url, sidecar_token_file), _client(grafana_url, token_file, user_file)
        found = log.since(0.0 if since_s is None else time.time() - since_s)
    shown = [event for event in found if not kinds or event.kind in kinds]
    copies = _copy(copier, shown) if copier else None
    if as_json:
        click.echo(json_text({"events": msgspec.to_builtins(shown), "copies": copies and asdict(copies)}))
    else:
        click.echo("\n".join(map(annotate.line, shown)), nl=bool(shown))
        if not shown:
            click.echo("no events" if not found else "no events of this kind", err=True)
        _say(copies)
    if copies and copies.refused:
        raise SystemExit(1)


def _refuse_mixtures(
    text: str | None,
    closed: str | None,
    at_s: float | None,
    from_s: float | None,
    to_s: float | None,
    is_open: bool,
    details: Sequence[object],
) -> None:
    """Options that do not go together, as one sentence."""
    if closed is not None and (text or is_open or from_s is not None or to_s is not None or any(details)):
        raise click.UsageError(
            "--close ID takes --at and nothing else of an event: what it is about was said when it was opened"
        )
    if closed is None and not text:
        raise click.UsageError('say what was changed, such as vllm-watch annotate "prefix caching on"')
    if (to_s is None) != (from_s is None):
        raise click.UsageError("--from and --to belong together; a region that has not ended is --open --at TIME")
    if from_s is not None and (at_s is not None or is_open):
        raise click.UsageError("--from and --to are a region; leave out --at and --open")


def log_of(path: Path | None, sidecar_url: str | None, token_file: Path | None) -> annotate.EventLog:
    """The log that is meant. Raises ValueError and OSError."""
    source = click.get_current_context().get_parameter_source("path")
    if sidecar_url:
        if path and source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("name either --events or --sidecar")
        if token_file is None:
            raise click.UsageError(
                "--sidecar wants --sidecar-token-file: the word in the file that events_token_file of its configuration"
                " names"
            )
        return annotate.SidecarLog(sidecar_url, annotate.token(token_file))
    if token_file:
        raise click.UsageError("--sidecar-token-file belongs to --sidecar")
    if path:
        return annotate.FileLog(path)
    labs = list(annotate.running_labs(install.cache_dir()))
    if len(labs) == 1:
        from stack.lab.plan import LabConfig

        return annotate.FileLog(LabConfig(labs[0], {}).events)
    told = f"several labs run here ({', '.join(lab.name for lab in labs)})" if labs else "no lab runs here"
    raise click.UsageError(
        f"{told}: name the file with --events (it is `events` in the sidecar's configuration), or a sidecar with"
        " --sidecar"
    )


def _user() -> str | None:
    """A container's user may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


@contextlib.contextmanager
def _said_again(new: NewEvent) -> Iterator[None]:
    """What was not written, or perhaps was, can be said again without harm."""
    try:
        yield
    except common.UsageMistake as error:
        raise common.UsageMistake(
            f"{error.message}; to say it again without writing it twice: --id {new.id}"
        ) from error


def _sentence(told: annotate.OnRecord, closing: bool) -> str:
    if closing:
        return (
            f"closed: {annotate.line(told.event)}"
            if told.written
            else f"it was closed already, nothing changed: {annotate.line(told.event)}"
        )
    return (
        f"written: {annotate.line(told.event)}"
        if told.written
        else f"on record already, nothing written: {annotate.line(told.event)}"
    )


# ---- copies


def _client(url: str | None, token_file: Path | None, user_file: Path | None) -> grafana_client.GrafanaClient | None:
    """Raises ValueError and OSError."""
    if url is None:
        if token_file or user_file:
            raise click.UsageError("--token-file and --user-file belong to Grafana's address")
        return None
    from dashboards import grafana_client

    return grafana_client.GrafanaClient(url, grafana_client.authorization(token_file, user_file))


def _copy(client: grafana_client.GrafanaClient, found: Sequence[TuningEvent]) -> annotation_copies.Copies:
    from dashboards import annotation_copies

    with mistakes_told():
        return annotation_copies.copy_events(client, found)


def _copied(
    client: grafana_client.GrafanaClient, log: annotate.EventLog, event: TuningEvent
) -> annotation_copies.Copies | None:
    """The event, however long ago it was, and what else Grafana lacks. All of it is on record, so whatever fails here
    is a remark."""
    try:
        with mistakes_told():
            found = log.since(time.time() - COPIED_S)
        return _copy(client, list({one.id: one for one in (*found, event)}.values()))
    except common.UsageMistake as error:
        click.echo(
            f"not copied yet: {error.message}; the next annotate --grafana makes it, or vllm-watch events"
            " --copy-to-grafana",
            err=True,
        )
        return None


def _say(copies: annotation_copies.Copies | None) -> None:
    if copies is None:
        return
    click.echo(f"annotations in Grafana: {len(copies.made)} made, {len(copies.changed)} changed", err=True)
    for event_id, why in copies.refused:
        click.echo(f"not copied: {event_id}: {why}", err=True)

"""`vllm-watch annotate` and `vllm-watch events`: record and list changes."""

from __future__ import annotations

import contextlib
import getpass
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec

from exporters.events.log import Kind, ManualKind, NewEvent, TuningEvent, new_id
from exporters.text import parse_duration
from stack.cli import common
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors
from stack.cli.struct_options import options_of
from stack.lab import install
from stack.option import Opt
from stack.tuning import annotate

if TYPE_CHECKING:
    from dashboards import annotation_copies, grafana_client

FILE_VARIABLE = "VLLM_WATCH_EVENTS"
COPIED_S = 30 * 86400.0  # how far back `annotate --grafana` looks for what Grafana lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLogOptions:
    """Which log of events is meant."""

    path: Annotated[
        Path | None,
        Opt(
            name="--events",
            envvar=FILE_VARIABLE,
            file=True,
            help=f"Events file.  [default: {FILE_VARIABLE}, else the running lab's]",
        ),
    ] = None
    sidecar_url: Annotated[
        str | None, Opt(name="--sidecar", metavar="URL", help="URL of a sidecar that owns the events file.")
    ] = None
    sidecar_token_file: Annotated[Path | None, Opt(help="File with the sidecar's events token.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrafanaLogin:
    """Login of the Grafana that gets copies."""

    token_file: Annotated[
        Path | None, Opt(help="File with a Grafana service account token.  [default: GRAFANA_TOKEN]")
    ] = None
    user_file: Annotated[Path | None, Opt(help="File with user:password for Grafana.")] = None


def _moment(text: str) -> float:
    """Unix seconds of now-10m, 2026-03-01T12:00:00Z or milliseconds. Raises ValueError."""
    from stack.board.view import moment

    return moment(text, time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotateOptions:
    """Options of `vllm-watch annotate`."""

    tags: Annotated[tuple[str, ...], Opt(name="--tag", metavar="WORD", help="Repeatable.")] = ()
    kind: Annotated[ManualKind, Opt(help="Kind of event; a note starts no comparison and no alert.")] = "change"
    diffs: Annotated[
        tuple[str, ...], Opt(name="--diff", metavar="OPTION=OLD->NEW", help="Changed option; repeatable.")
    ] = ()
    at_s: Annotated[
        float | None,
        Opt(
            name="--at",
            metavar="TIME",
            read=_moment,
            help="Time: now-10m, 2026-03-01T12:00:00Z or ms; UTC by default.  [default: now]",
        ),
    ] = None
    from_s: Annotated[float | None, Opt(name="--from", metavar="TIME", read=_moment, help="Start of a region.")] = None
    to_s: Annotated[float | None, Opt(name="--to", metavar="TIME", read=_moment, help="End of a region.")] = None
    is_open: Annotated[bool, Opt(name="--open", help="Open a region that starts at --at, else now.")] = False
    closed: Annotated[str | None, Opt(name="--close", metavar="ID", help="Close an open region at --at, else now.")] = (
        None
    )
    event_id: Annotated[
        str | None, Opt(name="--id", metavar="ID", help="Id of the event; an existing id is not written again.")
    ] = None
    who: Annotated[str | None, Opt(metavar="NAME", help="Author.  [default: the current user]")] = None
    upstream: Annotated[
        str | None, Opt(metavar="NAME", help="Engine that was changed, by its name in the sidecar.")
    ] = None
    model: Annotated[str | None, Opt(metavar="NAME", help="Model that was changed.")] = None
    log: EventLogOptions
    grafana_url: Annotated[
        str | None,
        Opt(
            name="--grafana",
            metavar="URL",
            help=("Copy it to this Grafana as annotation, with events of 30 days that lack a copy."),
        ),
    ] = None
    login: GrafanaLogin


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsOptions:
    """Which events to show, and where to copy them."""

    since_s: Annotated[
        float | None,
        Opt(
            name="--since", metavar="TIME", read=parse_duration, help="Time range, such as 24h.  [default: all events]"
        ),
    ] = None
    kinds: Annotated[tuple[Kind, ...], Opt(name="--kind", help="Repeatable.")] = ()
    log: EventLogOptions
    grafana_url: Annotated[
        str | None,
        Opt(
            name="--copy-to-grafana",
            metavar="URL",
            help="Create the annotations that this Grafana lacks, except restarts.",
        ),
    ] = None
    login: GrafanaLogin


@click.command("annotate")
@click.argument("text", required=False)
@options_of(AnnotateOptions, "asked")
@AS_JSON
def annotate_command(text: str | None, asked: AnnotateOptions, as_json: bool) -> None:
    """Record a configuration change for dashboards and alerts.

    Prints the id of the event.

    Exit 2 when nothing was written. A Grafana that is away is no failure: its copy is made the next time.

    \b
    Example:  vllm-watch annotate "prefix caching on" --diff 'enable-prefix-caching=off->on' \
                --tag rollout --events events.jsonl
              vllm-watch annotate "canary at 10 %" --open --id canary-7 --events events.jsonl
              vllm-watch annotate --close canary-7 --events events.jsonl
    """
    _refuse_mixtures(text, asked)
    with mistakes_as_errors():
        log, copier = log_of(asked.log), _client(asked.grafana_url, asked.login)
    if asked.closed:
        with mistakes_as_errors():
            recorded = log.close(asked.closed, asked.at_s)
    else:
        with mistakes_as_errors():
            new = _new_event(text or "", asked)
        with _said_again(new), mistakes_as_errors():
            recorded = log.record(new)
    copies = _copied(copier, log, recorded.event) if copier else None
    if as_json:
        click.echo(
            json_text(
                {
                    "event": msgspec.to_builtins(recorded.event),
                    "written": recorded.written,
                    "copies": copies and asdict(copies),
                }
            )
        )
        return
    click.echo(recorded.event.id)
    click.echo(_sentence(recorded, asked.closed is not None), err=True)
    _say(copies)


@click.command("events")
@options_of(EventsOptions, "asked")
@AS_JSON
def events_command(asked: EventsOptions, as_json: bool) -> None:
    """List configuration changes and other events.

    Times are UTC.

    Exit 1 when Grafana refuses a copy, 2 when the events file cannot be read or written.

    \b
    Example:  vllm-watch events --since 24h --kind change --events events.jsonl
    """
    with mistakes_as_errors():
        log, copier = log_of(asked.log), _client(asked.grafana_url, asked.login)
        found = log.since(0.0 if asked.since_s is None else time.time() - asked.since_s)
    shown = [event for event in found if not asked.kinds or event.kind in asked.kinds]
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


def _refuse_mixtures(text: str | None, asked: AnnotateOptions) -> None:
    """Options that do not go together, as one sentence."""
    is_region = asked.from_s is not None or asked.to_s is not None
    details = (asked.tags, asked.diffs, asked.event_id, asked.who, asked.upstream, asked.model)
    if asked.closed is not None and (text or asked.is_open or is_region or any(details)):
        raise click.UsageError(
            "--close ID takes --at and nothing else of an event: what it is about was said when it was opened"
        )
    if asked.closed is None and not text:
        raise click.UsageError('say what was changed, such as vllm-watch annotate "prefix caching on"')
    if (asked.to_s is None) != (asked.from_s is None):
        raise click.UsageError("--from and --to belong together; a region that has not ended is --open --at TIME")
    if asked.from_s is not None and (asked.at_s is not None or asked.is_open):
        raise click.UsageError("--from and --to are a region; leave out --at and --open")


def _new_event(text: str, asked: AnnotateOptions) -> NewEvent:
    """Raises ValueError."""
    return NewEvent(
        what=text,
        kind=asked.kind,
        id=asked.event_id or new_id(),
        at_s=asked.at_s if asked.from_s is None else asked.from_s,
        end_s=asked.to_s,
        open=asked.is_open,
        who=asked.who or _user(),
        upstream=asked.upstream,
        model=asked.model,
        diff=annotate.differences(asked.diffs),
        tags=asked.tags,
    )


def log_of(asked: EventLogOptions) -> annotate.EventLog:
    """The log that is meant. Raises ValueError and OSError."""
    source = click.get_current_context().get_parameter_source("path")
    if asked.sidecar_url:
        if asked.path and source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("name either --events or --sidecar")
        if asked.sidecar_token_file is None:
            raise click.UsageError(
                "--sidecar wants --sidecar-token-file: the word in the file that events_token_file of its configuration"
                " names"
            )
        return annotate.SidecarLog(asked.sidecar_url, annotate.token(asked.sidecar_token_file))
    if asked.sidecar_token_file:
        raise click.UsageError("--sidecar-token-file belongs to --sidecar")
    if asked.path:
        return annotate.FileLog(asked.path)
    labs = list(annotate.running_labs(install.cache_dir()))
    if len(labs) == 1:
        from stack.lab.plan import LabConfig

        return annotate.FileLog(LabConfig(labs[0], {}).events)
    labs_text = f"several labs run here ({', '.join(lab.name for lab in labs)})" if labs else "no lab runs here"
    raise click.UsageError(
        f"{labs_text}: name the file with --events (it is `events` in the sidecar's configuration), or a sidecar with"
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
    """Return the command that repeats an annotation that may not have been written; repeating is safe."""
    try:
        yield
    except common.UsageMistake as error:
        raise common.UsageMistake(
            f"{error.message}; to say it again without writing it twice: --id {new.id}"
        ) from error


def _sentence(recorded: annotate.OnRecord, closing: bool) -> str:
    if closing:
        return (
            f"closed: {annotate.line(recorded.event)}"
            if recorded.written
            else f"it was closed already, nothing changed: {annotate.line(recorded.event)}"
        )
    return (
        f"written: {annotate.line(recorded.event)}"
        if recorded.written
        else f"on record already, nothing written: {annotate.line(recorded.event)}"
    )


# ---- copies


def _client(url: str | None, login: GrafanaLogin) -> grafana_client.GrafanaClient | None:
    """Raises ValueError and OSError."""
    if url is None:
        if login.token_file or login.user_file:
            raise click.UsageError("--token-file and --user-file belong to Grafana's address")
        return None
    from dashboards import grafana_client

    return grafana_client.GrafanaClient(url, grafana_client.authorization(login.token_file, login.user_file))


def _copy(client: grafana_client.GrafanaClient, found: Sequence[TuningEvent]) -> annotation_copies.Copies:
    from dashboards import annotation_copies

    with mistakes_as_errors():
        return annotation_copies.copy_events(client, found)


def _copied(
    client: grafana_client.GrafanaClient, log: annotate.EventLog, event: TuningEvent
) -> annotation_copies.Copies | None:
    """The event, however long ago it was, and what else Grafana lacks. All of it is on record, so whatever fails here
    is a remark."""
    try:
        with mistakes_as_errors():
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

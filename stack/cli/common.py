"""Shared parts of all commands: errors as one sentence, the log of services, output as JSON. The sidecar and the
gateway import this, so it imports nothing that they do not need."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from stack.config import BadConfig

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class UsageMistake(click.ClickException):
    """A mistake that the caller can fix; exit status 2, as for wrong options."""

    exit_code = 2


@contextlib.contextmanager
def mistakes_as_errors() -> Iterator[None]:
    """Errors that a user can act on, as one sentence and exit status 2."""
    try:
        yield
    except (BadConfig, ValueError, OSError) as error:
        raise UsageMistake(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def json_text(content: object) -> str:
    """Indented JSON with letters of every language as they are."""
    return json.dumps(content, indent=1, ensure_ascii=False)


def say_files(
    written: Mapping[Path, bool],
    older: Sequence[Path],
    warned: Sequence[str],
    steps: Sequence[str],
    as_json: bool,
    more: Mapping[str, object] | None = None,
) -> None:
    """Print what an export has written, what is left over from an earlier one, and what to do next. more: further
    fields of the JSON form."""
    for warning in warned:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        rows = [{"path": str(file), "changed": changed} for file, changed in written.items()]
        said = {"files": rows, "left_over": [str(file) for file in older], "warnings": warned, "next": steps}
        click.echo(json.dumps({**said, **(more or {})}, indent=1))
        return
    for file, changed in written.items():
        click.echo(f"{'written' if changed else 'unchanged'}: {file}")
    for file in older:
        click.echo(f"left over from an earlier export, remove it: {file}")
    for step in steps:
        click.echo(f"next: {step}")


def log_to_stderr() -> None:
    """The log of a command that serves."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)

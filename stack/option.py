"""Opt: command-line option of a struct's field. Structs lie below stack/cli, so this knows no click."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Opt:
    """Annotation of a field that is an option; stack/cli/struct_options.py reads it. What type and default of the field
    say is not repeated here.

    name: --field-name where it is empty. read: text -> value, where a ValueError is about this option alone. convert:
    what was given -> value, with errors like those of the struct itself. write: the default as it would be typed. file:
    no folder will do. exists: it must be there already."""

    help: str | None = None
    metavar: str | None = None
    name: str = ""
    read: Callable[[str], Any] | None = None
    convert: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None
    choices: tuple[str, ...] = ()
    envvar: str | None = None
    file: bool = False
    exists: bool = False

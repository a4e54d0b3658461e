"""Configuration files as frozen objects. Each struct stands beside the code that uses it; here is the one way to read any of them.

A mistake in a file is told in one sentence that names the place and, where there is one, the nearest right word."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

T = TypeVar("T")


class BadConfig(Exception):
    """A configuration file that cannot be used; the message is for the person who edits it."""


def load(path: Path, kind: type[T]) -> T:
    """The file as `kind` (a msgspec Struct with forbid_unknown_fields). An empty file means all defaults. Raises BadConfig."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise BadConfig(f"{path} cannot be read: {why}") from error
    return parse(text, kind, str(path))


def parse(text: str, kind: type[T], place: str) -> T:
    """Text of a YAML file as `kind`; `place` names it in messages. Raises BadConfig."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise BadConfig(f"{place}{line}: this is not YAML: {getattr(error, 'problem', None) or error}") from error
    try:
        return msgspec.convert({} if data is None else data, kind, str_keys=False)
    except msgspec.ValidationError as error:
        raise BadConfig(f"{place}: {_keyed(explain(str(error), kind), data)}") from error


_CALLED = {str: "str", bool: "bool", list: "array", dict: "object", type(None): "null"}


def _keyed(message: str, data: Any) -> str:
    """msgspec writes x[...] for some key of the mapping x; here it is the first whose value has the type that was found wrong."""
    found = re.match(r"(\w+)\[\.\.\.\](?=.*got `(\w+)`)", message)
    keys = [key for key, value in data[found[1]].items() if _CALLED.get(type(value)) == found[2]] if found else []
    return f"{found[1]}.{keys[0]}{message[found.end() :]}" if found and keys else message


def explain(message: str, kind: type[Any]) -> str:
    """msgspec's message in words that lead to the mistake: the dotted place first, then what is wrong."""
    found = re.fullmatch(r"(?P<what>.*?)(?: - at `(?:key in )?\$(?P<where>.*)`)?", message, re.DOTALL)
    what, where = (found["what"], (found["where"] or "").lstrip(".")) if found else (message, "")
    unknown = re.search(r"unknown field `([^`]+)`", what)
    if unknown:
        name = unknown[1]
        near = difflib.get_close_matches(name, _words(kind, where), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{where + '.' if where else ''}{name} is unknown{hint}"
    missing = re.search(r"required field `([^`]+)`", what)
    if missing:
        return f"{where + '.' if where else ''}{missing[1]} is missing"
    return f"{where}: {what}" if where else what


def _words(kind: type[Any], where: str) -> list[str]:
    """The field names allowed at a dotted place; every name of the whole file where the place is inside a list or mapping."""
    names: list[str] = []

    def visit(t: msgspec.inspect.Type) -> None:
        if isinstance(t, msgspec.inspect.StructType):
            for field in t.fields:
                names.append(field.encode_name)
                visit(field.type)
        for part in ("item_type", "value_type"):
            if isinstance(inner := getattr(t, part, None), msgspec.inspect.Type):
                visit(inner)
        if isinstance(t, msgspec.inspect.UnionType):
            for inner in t.types:
                visit(inner)

    visit(msgspec.inspect.type_info(kind))
    return names

"""Objects with expressions of Helm as the text of a template.

Invariant: text of ours never becomes part of an expression; only Expr, YamlBlock, When and Lines hold any."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import yaml

_EXPR, _LINE = ("\u27e6", "\u27e7"), ("\u27ea", "\u27eb")  # around expressions and lines while they are YAML
_LINES = re.compile(rf"^(?P<indent> *)(?:- )?'?{_LINE[0]}(?P<text>.*?){_LINE[1]}\d*'?(?:: '')?$")
_BLOCK = re.compile(rf"^(?P<before>(?P<indent> *(?:- )?)\S+:) '?{_EXPR[0]}\|(?P<text>.*?){_EXPR[1]}'?$")
_SCALAR = re.compile(rf"'?{_EXPR[0]}(?P<text>[^|].*?){_EXPR[1]}'?")


@dataclass(frozen=True)
class Expr:
    """Scalar that an expression prints, with quotes of its own where it needs them."""

    text: str


@dataclass(frozen=True)
class YamlBlock:
    """Mapping or list that an expression prints as YAML."""

    text: str


@dataclass(frozen=True)
class When:
    """Value that is there only under a condition: its key, or the item of a list, is left out otherwise."""

    condition: str
    value: Any


@dataclass(frozen=True)
class Lines:
    """Further lines of a mapping that an expression prints. Its key only has to be unique there."""

    text: str


def text_of(made: Any, indent: int = 0) -> str:
    """Return an object as the text of a template, from a column on."""
    printed = yaml.dump(_marked(made), Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    return "\n".join(_line(line, indent) for line in printed.splitlines())


def several(objects: Iterable[tuple[str, Any]]) -> str:
    """Return a template of objects, each with its condition; an empty one always holds."""
    parts = []
    for condition, alike in itertools.groupby(objects, key=itemgetter(0)):
        text = "\n".join(f"---\n{text_of(made)}" for _, made in alike)
        parts.append(f"{{{{- if {condition} }}}}\n{text}\n{{{{- end }}}}" if condition else text)
    return "\n".join(parts) + "\n"


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _marked(value: Any) -> Any:
    match value:
        case Expr(text):
            return f"{_EXPR[0]}{text}{_EXPR[1]}"
        case YamlBlock(text):
            return f"{_EXPR[0]}|{text}{_EXPR[1]}"
        case dict():
            return dict(_pairs(value))
        case list():
            return [item for each in value for item in _items(each)]
        case _:
            return value


def _pairs(made: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys that are always there come first: an item of a list begins with one."""
    always = {key: each for key, each in made.items() if not isinstance(each, When | Lines)}
    yield from ((key, _marked(each)) for key, each in always.items())
    for number, (key, each) in enumerate((key, each) for key, each in made.items() if key not in always):
        if isinstance(each, Lines):
            yield f"{_LINE[0]}{each.text} | nindent{_LINE[1]}{number}", ""
            continue
        yield f"{_LINE[0]}if {each.condition}{_LINE[1]}{number}", ""
        yield key, _marked(each.value)
        yield f"{_LINE[0]}end{_LINE[1]}{number}", ""


def _items(each: Any) -> Iterator[Any]:
    if not isinstance(each, When):
        yield _marked(each)
        return
    yield f"{_LINE[0]}if {each.condition}{_LINE[1]}"
    yield _marked(each.value)
    yield f"{_LINE[0]}end{_LINE[1]}"


def _line(line: str, indent: int) -> str:
    """Return a line of YAML with its marks as expressions; `nindent` gets the column that it lacks."""
    pad = " " * indent
    if found := _LINES.fullmatch(line):
        text = re.sub(r"nindent$", f"nindent {len(found['indent']) + indent}", found["text"])
        return f"{pad}{found['indent']}{{{{- {text} }}}}"
    if found := _BLOCK.fullmatch(line):
        column = len(found["indent"]) + 2 + indent
        return f"{pad}{found['before']} {{{{- {found['text']} | nindent {column} }}}}"
    return pad + _SCALAR.sub(lambda each: f"{{{{ {each['text']} }}}}", line)

"""Configuration files as frozen objects. Each struct stands beside the code that uses it; here is the one way to read
any of them.

A mistake in a file is told in one sentence that names the place and, where there is one, the nearest right word. What
stands there in place of YAML
is not repeated: it may be a password that should have been in quotes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

T = TypeVar("T")

_BOOL = "tag:yaml.org,2002:bool"

# PyYAML's words up to where they repeat the text: of what is in quotes, the names of its own tokens and single
# characters stay.
_OWN_WORDS = re.compile(r"""(?:(?:expected|found|got) '<[a-z ]+>'|'\\?.'|[^'"])*""")


class BadConfig(Exception):
    """A configuration file that cannot be used; the message is for the person who edits it."""


def load(path: Path, kind: type[T]) -> T:
    """The file as `kind` (a msgspec Struct with forbid_unknown_fields). An empty file means all defaults. Raises
    BadConfig."""
    return read(path).into(kind)


def parse(text: str, kind: type[T], place: str) -> T:
    """Text of a YAML file as `kind`; `place` names it in messages. Raises BadConfig."""
    return source(text, place).into(kind)


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A YAML file that was read. root: its nodes, which know their lines; None for a file of one line, where a number
    says nothing."""

    place: str
    data: Any
    root: yaml.Node | None

    def into(self, kind: type[T]) -> T:
        """The data as `kind`. Raises BadConfig."""
        try:
            return msgspec.convert({} if self.data is None else self.data, kind, str_keys=False)
        except msgspec.ValidationError as error:
            raise BadConfig(self.told(_keyed(explain(str(error), kind), error, self.data, kind))) from error

    def told(self, sentence: str) -> str:
        """A sentence that begins with a dotted place, behind the name of the file and the line of that place."""
        line = _line(self.root, sentence)
        return f"{self.place}{f', line {line}' if line else ''}: {sentence}"


def read(path: Path) -> YamlFile:
    """The file, read but not yet understood. Raises BadConfig."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise BadConfig(f"{path} cannot be read: {why}") from error
    return source(text, str(path))


def source(text: str, place: str) -> YamlFile:
    """YAML text, read but not yet understood; `place` names it in messages. Raises BadConfig."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        data = None if root is None else loader.construct_document(root)
    except RecursionError:
        raise BadConfig(f"{place}: this is not YAML that can be read: it is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        # which repeats the text around the mistake
        raise BadConfig(f"{place}{line}: this is not YAML: {_problem(error)}") from None
    return YamlFile(place, data, root if "\n" in text.strip() else None)


class _Mistake(yaml.MarkedYAMLError):
    """One that we find, told as it stands."""


def _problem(error: yaml.YAMLError) -> str:
    """What is wrong, in PyYAML's words or ours, with none of the file's but names of keys."""
    if isinstance(error, _Mistake):
        return str(error.problem)
    # the second for a character that no YAML may hold
    told = getattr(error, "problem", None) or str(error).partition("\n")[0]
    found = _OWN_WORDS.match(told)
    return (found[0].rstrip(" ,:") if found else "") or "it cannot be read"


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML allows it nowhere, and PyYAML lets the last one win without a word. Only
    true and false are truth values, as YAML 1.2 has it: `off` is a word, such as the name of an arm."""

    yaml_implicit_resolvers: Any = {  # noqa: RUF012 (as PyYAML declares it)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if (
                isinstance(key, yaml.ScalarNode)
                and (mark := first.setdefault(key.value, key.start_mark)) is not key.start_mark
            ):
                raise _Mistake(
                    problem=f"{key.value} stands here again, first in line {mark.line + 1}", problem_mark=key.start_mark
                )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Such as a date in month 13 or `!!bool x`, of which PyYAML says neither the line nor that it is a mistake in
        the file."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError):
            kind = node.tag.rpartition(":")[2]  # one of YAML's own: another has no constructor
            raise _Mistake(problem=f"what stands here is no {kind}", problem_mark=node.start_mark) from None


_Loader.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def _line(node: yaml.Node | None, sentence: str) -> int | None:
    """The line of the dotted place with which a sentence begins, or of the nearest thing around it that stands in the
    text."""
    line = None
    while (step := _step(node, sentence)) is not None:
        line, node, sentence = step
    return line


def _step(node: yaml.Node | None, sentence: str) -> tuple[int, yaml.Node, str] | None:
    """One name or index further: its line, what is there, and the rest of the sentence."""
    if isinstance(node, yaml.MappingNode):
        latest_first = node.value[::-1]  # what was merged in by << stands before what the mapping says itself
        # a name may begin with another
        for key, value in sorted(latest_first, key=lambda pair: len(str(pair[0].value)), reverse=True):
            if isinstance(key, yaml.ScalarNode) and re.match(rf"{re.escape(key.value)}(?=[.:\[ ]|$)", sentence):
                return key.start_mark.line + 1, value, sentence[len(key.value) :].lstrip(".: ")
    elif (
        isinstance(node, yaml.SequenceNode)
        and (found := re.match(r"\[(\d+)\][.: ]*", sentence))
        and int(found[1]) < len(node.value)
    ):
        item = node.value[int(found[1])]
        return item.start_mark.line + 1, item, sentence[found.end() :]
    return None


def _keyed(sentence: str, error: msgspec.ValidationError, data: Any, kind: type[Any]) -> str:
    """msgspec writes x[...] for some key of the mapping x; here it is the first that alone brings the same error."""
    if not (found := re.match(r"(\w+)\[\.\.\.\]", sentence)):
        return sentence
    for key, value in data[found[1]].items():
        try:
            msgspec.convert(data | {found[1]: {key: value}}, kind, str_keys=False)
        except msgspec.ValidationError as alone:
            if str(alone) == str(error):
                return f"{found[1]}.{key}{sentence[found.end() :]}"
    return sentence


def explain(message: str, kind: type[Any]) -> str:
    """msgspec's message in words that lead to the mistake: the dotted place first, then what is wrong."""
    if found := re.fullmatch(r"Expected `str`, got `(\w+)` - at `key` in `\$\.(.*)`", message):
        return f"{found[2]}: a name in it is read as `{found[1]}`; put it in quotes"
    found = re.fullmatch(r"(?P<what>.*?)(?: - at `(?:key in )?\$(?P<where>.*)`)?", message, re.DOTALL)
    what, where = (found["what"], (found["where"] or "").lstrip(".")) if found else (message, "")
    unknown = re.search(r"unknown field `([^`]+)`", what)
    if unknown:
        return f"{where + '.' if where else ''}{unknown[1]} is unknown{meant(unknown[1], _words(kind, where))}"
    missing = re.search(r"required field `([^`]+)`", what)
    if missing:
        return f"{where + '.' if where else ''}{missing[1]} is missing"
    if chosen := re.search(r"enum value '([^']+)'", what):
        what += meant(chosen[1], _words(kind, where))
    return f"{where}: {what}" if where else what


def meant(word: str, words: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the nearest right one, or all of them where none is near and they
    are few."""
    there = list(words)
    if near := difflib.get_close_matches(word, there, n=1):
        return f"; did you mean {near[0]}?"
    return f"; choose from {', '.join(there)}" if 0 < len(there) <= 12 else ""


def _words(kind: type[Any], where: str) -> list[str]:
    """What may stand at a dotted place: the names of fields, or the values to choose from."""
    types = [msgspec.inspect.type_info(kind)]
    for step in re.findall(r"\[[^]]*\]|[^][.]+", where):
        types = [inner for t in types for inner in _inside(t, step)]
    return [word for t in types for word in _choices(t)]


def _inside(t: msgspec.inspect.Type, step: str) -> Iterator[msgspec.inspect.Type]:
    """The types one step further: of a field by its name, of the items of a list or mapping by an index."""
    if isinstance(t, msgspec.inspect.UnionType):
        yield from (inner for one in t.types for inner in _inside(one, step))
    elif isinstance(t, msgspec.inspect.StructType):
        yield from (field.type for field in t.fields if field.encode_name == step)
    elif step.startswith("["):
        yield from (
            part
            for name in ("item_type", "value_type")
            if isinstance(part := getattr(t, name, None), msgspec.inspect.Type)
        )


def _choices(t: msgspec.inspect.Type) -> Iterator[str]:
    if isinstance(t, msgspec.inspect.UnionType):
        yield from (word for one in t.types for word in _choices(one))
    elif isinstance(t, msgspec.inspect.StructType):
        yield from (field.encode_name for field in t.fields)
    elif isinstance(t, msgspec.inspect.LiteralType):
        yield from map(str, t.values)
    elif isinstance(t, msgspec.inspect.EnumType):
        yield from (str(member.value) for member in t.cls)

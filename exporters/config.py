"""Configuration files as frozen objects. Each struct is defined beside the code that uses it.

A mistake is reported in one sentence with its place and, if there is one, the nearest valid word. Text that is not
YAML is not quoted: it may be a password without its quotes."""

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

# PyYAML's message up to quoted file text; names of its tokens and single characters stay.
_OWN_WORDS = re.compile(r"""(?:(?:expected|found|got) '<[a-z ]+>'|'\\?.'|[^'"])*""")


class BadConfig(Exception):
    """Unusable configuration file; the message is for its editor."""


def load(path: Path, kind: type[T]) -> T:
    """Parse a file as `kind` (a msgspec Struct with forbid_unknown_fields). Raises BadConfig.

    An empty file means all defaults."""
    return read(path).into(kind)


def parse(text: str, kind: type[T], place: str) -> T:
    """Parse YAML text as `kind`; `place` names it in messages. Raises BadConfig."""
    return source(text, place).into(kind)


@dataclass(frozen=True, slots=True)
class YamlFile:
    """YAML document. root: its nodes, which have line numbers; None for a single line, where numbers are useless."""

    place: str
    data: Any
    root: yaml.Node | None

    def into(self, kind: type[T]) -> T:
        """Convert the data to `kind`. Raises BadConfig."""
        try:
            return msgspec.convert({} if self.data is None else self.data, kind, str_keys=False)
        except msgspec.ValidationError as error:
            raise BadConfig(self.locate(_keyed(explain(str(error), kind), error, self.data, kind))) from error

    def locate(self, sentence: str) -> str:
        """Prefix a sentence that starts with a dotted path with the file name and the line of that path."""
        line = _line(self.root, sentence)
        return f"{self.place}{f', line {line}' if line else ''}: {sentence}"


def read(path: Path) -> YamlFile:
    """Read a YAML file without converting it. Raises BadConfig."""
    return source(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a file. Raises BadConfig."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise BadConfig(f"{path} cannot be read: {why}") from error


def source(text: str, place: str) -> YamlFile:
    """Read YAML text without converting it; `place` names it in messages. Raises BadConfig."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        data = None if root is None else loader.construct_document(root)
    except RecursionError:
        raise BadConfig(f"{place}: invalid YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        # str(error) repeats the text around the mistake
        raise BadConfig(f"{place}{line}: invalid YAML: {_problem(error)}") from None
    return YamlFile(place, data, root if "\n" in text.strip() else None)


def with_scalar(text: str, place: str, path: tuple[str, ...], value: str) -> str:
    """Return YAML text in which the value at a path of keys is another, and everything else, comments too, as it was.

    Raises BadConfig if there is no such value, or it is an alias or not a scalar."""
    try:
        node: yaml.Node | None = _Loader(text).get_single_node()
    except (RecursionError, yaml.YAMLError):
        node = None
    after = 0
    for name in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(key.end_mark.index, child) for key, child in pairs if key.value == name]
        after, node = found[-1] if found else (0, None)
    if not isinstance(node, yaml.ScalarNode) or node.start_mark.index < after:
        dotted = ".".join(path)
        raise BadConfig(f"{place}: {dotted} is not written there as a value; write it as `{path[-1]}: {value}`")
    return text[: node.start_mark.index] + value + text[node.end_mark.index :]


class _Mistake(yaml.MarkedYAMLError):
    """Mistake found by this module, reported as is."""


def _problem(error: yaml.YAMLError) -> str:
    """Return the problem, with no text of the file except names of keys."""
    if isinstance(error, _Mistake):
        return str(error.problem)
    # ReaderError: a character that YAML forbids
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    found = _OWN_WORDS.match(problem)
    return (found[0].rstrip(" ,:") if found else "") or "it cannot be read"


class _Loader(yaml.SafeLoader):
    """Loader that rejects duplicate keys, which PyYAML accepts silently.

    Only true and false are booleans, as in YAML 1.2: `off` is a word, such as the name of a variant."""

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
                    problem=f"duplicate key {key.value}, first in line {mark.line + 1}", problem_mark=key.start_mark
                )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Report values such as a date in month 13 or `!!bool x` as mistakes with a line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError):
            kind = node.tag.rpartition(":")[2]  # a YAML tag; others have no constructor
            raise _Mistake(problem=f"not a valid {kind}", problem_mark=node.start_mark) from None


_Loader.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def _line(node: yaml.Node | None, sentence: str) -> int | None:
    """Return the line of the dotted path at the start of a sentence, or of its nearest existing parent."""
    line = None
    while (step := _step(node, sentence)) is not None:
        line, node, sentence = step
    return line


def _step(node: yaml.Node | None, sentence: str) -> tuple[int, yaml.Node, str] | None:
    """Resolve one name or index: return its line, its node, and the rest of the sentence."""
    if isinstance(node, yaml.MappingNode):
        latest_first = node.value[::-1]  # keys merged by << come before the mapping's own
        # a name may be the prefix of another
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
    """Replace the x[...] in a msgspec message by the first key that alone causes the same error."""
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
    """Rewrite a msgspec message: dotted path first, then the mistake."""
    if found := re.fullmatch(r"Expected `str`, got `(\w+)` - at `key` in `\$\.(.*)`", message):
        return f"{found[2]}: YAML reads a name in it as `{found[1]}`; put it in quotes"
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
    """Return the end of a sentence about an unknown word: the nearest valid word, or all if there are few."""
    there = list(words)
    if near := difflib.get_close_matches(word, there, n=1):
        return f"; did you mean {near[0]}?"
    return f"; choose from {', '.join(there)}" if 0 < len(there) <= 12 else ""


def _words(kind: type[Any], where: str) -> list[str]:
    """Return the valid names or values at a dotted path."""
    types = [msgspec.inspect.type_info(kind)]
    for step in re.findall(r"\[[^]]*\]|[^][.]+", where):
        types = [inner for t in types for inner in _inside(t, step)]
    return [word for t in types for word in _choices(t)]


def _inside(t: msgspec.inspect.Type, step: str) -> Iterator[msgspec.inspect.Type]:
    """Return the types one step down: of a field by name, of items by index."""
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

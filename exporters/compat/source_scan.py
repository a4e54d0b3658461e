"""Scanner for the metric families in vLLM's source, for all flags, without import, start or GPU.

It reads syntax trees. Names are literals there, kinds and labels mostly; names built at run time are reported as
unread."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"vllm:[a-z][a-z0-9_]*")
_BASE = ("engine", "model_name")  # content of vLLM's own list of label names
_KINDS = ("counter", "gauge", "histogram", "summary")
_MAKES = re.compile(r"""["']vllm:[a-z{]|\bdocumentation=""")  # a file may create families named in another
_CLIENTS = ("benchmarks", "tests")  # packages that read metrics of others


@dataclass(frozen=True, slots=True)
class SourceFamily:
    """Family as found.

    name: as in a scrape, except that a counter of unknown kind may lack _total. kind: '' if unknown; labels, bounds:
    None if unknown; where: the file and line, or 'page'."""

    name: str
    kind: str = ""
    labels: tuple[str, ...] | None = None
    help: str = ""
    bounds: tuple[float, ...] | None = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class SourceScan:
    """Result of a scan. unread: places with metric names built at run time."""

    families: Mapping[str, SourceFamily]
    unread: tuple[str, ...]


def files(package: Path) -> Iterator[tuple[str, str]]:
    """Yield path below the package and text of each file that may name a family."""
    for path in sorted(package.rglob("*.py")):
        below = path.relative_to(package)
        if below.parts[0] not in _CLIENTS:
            text = path.read_text(encoding="utf-8", errors="replace")
            if _MAKES.search(text):
                yield below.as_posix(), text


def release(package: Path) -> str | None:
    """Return the version of an installed package; None for source that was never built."""
    for metadata in sorted(package.parent.glob("vllm*.dist-info/METADATA")):
        if match := re.search(r"^Version: (\S+)", metadata.read_text(encoding="utf-8"), re.MULTILINE):
            return match[1]
    return None


def read(sources: Iterable[tuple[str, str]]) -> SourceScan:
    """Return the families in these files; sources: path and text. Raises ValueError for a file that does not parse."""
    trees = [(path, _tree(path, text)) for path, text in sources]
    constants = {key: value for path, tree in trees for key, value in _constants(path, tree)}
    ranked_families = [ranked for path, tree in trees for ranked in _File(path, tree, constants).families()]
    families_by_name = {
        family.name: family for _, family in sorted(ranked_families, key=lambda ranked: ranked[0], reverse=True)
    }
    # A bare name and the created counter differ by _total.
    doubles = {
        name for name, family in families_by_name.items() if not family.kind and f"{name}_total" in families_by_name
    }
    unread = [
        f"{path}:{node.lineno}"
        for path, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) and _opens_a_name(node)
    ]
    return SourceScan(
        {name: families_by_name[name] for name in sorted(families_by_name.keys() - doubles)}, tuple(unread)
    )


def _tree(path: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: cannot parse; run vllm-watch with the engine's Python version or newer"
        ) from error


def _constants(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield string constants of a file by `file:NAME` and, for classes of any file, by `Class.NAME`."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef | ast.Module):
            continue
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else f"{path}:"
        for node in owner.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (text := _string(node.value)):
                yield prefix + node.targets[0].id, text


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the key of `_constants` for each name that a file imports from another file of the package."""
    folder = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else []
            module = "/".join([*above, *(node.module or "").removeprefix("vllm.").split(".")])
            yield from ((alias.asname or alias.name, f"{module}.py:{alias.name}") for alias in node.names)


def _string(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _literal(node: ast.AST | None) -> str | None:
    """Return the family name if the node is one."""
    text = _string(node)
    return text if text and _NAME.fullmatch(text) else None


def _opens_a_name(node: ast.JoinedStr) -> bool:
    first = node.values[0] if node.values else None
    return isinstance(first, ast.Constant) and bool(re.fullmatch(r"vllm:\w*", str(first.value)))


class _File:
    """Declarations in one file."""

    def __init__(self, path: str, tree: ast.Module, constants: Mapping[str, str]) -> None:
        self._path, self._tree, self._constants = path, tree, constants
        self._imported = dict(_imports(path, tree))
        self._assigned: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._assigned.setdefault(node.targets[0].id, node.value)

    def families(self) -> Iterator[tuple[int, SourceFamily]]:
        """Yield families with a rank: 0 created here, 1 described and created elsewhere, 2 only named."""
        for name, call in self._declared():
            kind = _kind(call)
            yield (
                int(_describes(call)),
                SourceFamily(
                    name=f"{name}_total" if kind == "counter" and not name.endswith("_total") else name,
                    kind=kind,
                    labels=self._labels(call),
                    help=_text(_argument(call, "documentation", 1)),
                    where=f"{self._path}:{call.lineno}",
                ),
            )
        for node in ast.walk(self._tree):
            if family_name := _literal(node):
                yield 2, SourceFamily(family_name, where=f"{self._path}:{getattr(node, 'lineno', 0)}")

    def _declared(self) -> Iterator[tuple[str, ast.Call]]:
        """Yield calls that create a family, with the name as argument or as key in a table."""
        for node in ast.walk(self._tree):
            pairs: list[tuple[ast.expr | None, ast.expr]] = []
            if isinstance(node, ast.Call):
                pairs = [(_argument(node, "name", 0), node)]
            elif isinstance(node, ast.Dict):
                pairs = list(zip(node.keys, node.values, strict=True))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                pairs = [(node.targets[0].slice, node.value)]
            for key, value in pairs:
                if isinstance(value, ast.Call) and _kind(value) and (name := self._name(key)):
                    yield name, value

    def _name(self, node: ast.expr | None) -> str | None:
        text = self._text(node)
        return text if text and _NAME.fullmatch(text) else None

    def _text(self, node: ast.expr | None) -> str | None:
        """Return the string of a literal, or of a constant of this file, an imported one or one of a class."""
        match node:
            case ast.Name(id=name):
                key = f"{self._path}:{name}"
                return self._constants.get(key if key in self._constants else self._imported.get(name, ""))
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return self._constants.get(f"{owner}.{name}")
        return _string(node)

    def _labels(self, call: ast.Call) -> tuple[str, ...] | None:
        """Return label names; connector descriptions (…Metadata) only hold labels beyond the engine's two."""
        given = _argument(call, "labelnames", 2)
        own: tuple[str, ...] | None = _BASE if _describes(call) else ()
        more = self._list(given) if given is not None else ()
        return None if own is None or more is None else tuple(sorted({*own, *more}))

    def _list(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> tuple[str, ...] | None:
        match node:
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                words = [word for element in elements if (word := self._text(element)) is not None]
                return tuple(words) if len(words) == len(elements) else None
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = self._list(left, seen), self._list(right, seen)
                return None if first is None or second is None else (*first, *second)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                if name in self._assigned and name not in seen:
                    return self._list(self._assigned[name], seen | {name})
                return _BASE if name.strip("_") == "labelnames" else None
        return None


def _callee(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lower()
    return ""


def _describes(call: ast.Call) -> bool:
    return _callee(call).endswith("metadata")


def _kind(call: ast.Call) -> str:
    """Return the kind from the callee's name, if the call has a help text.

    Matches Counter, self._counter_cls and OffloadingCounterMetadata, not increase_counter."""
    callee = _callee(call)
    has_help = any(keyword.arg == "documentation" for keyword in call.keywords) or (
        len(call.args) > 1 and bool(_text(call.args[1]))
    )
    return next((kind for kind in _KINDS if kind in callee), "") if has_help else ""


def _argument(call: ast.Call, name: str, at: int) -> ast.expr | None:
    """Return an argument by keyword or position."""
    by_name = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return by_name or (call.args[at] if len(call.args) > at else None)


def _text(node: ast.expr | None) -> str:
    return " ".join((_string(node) or "").split())

"""Text of an output without what differs between machines, moments and runs: paths, ports, dates of the run, keys."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

LINE = 100  # characters
LARGE = 10_000  # characters of an embedded document
NEAR_S = 3 * 3600  # a time so close to the run is a time of the run; inputs are months older
_FIXED: tuple[tuple[str, str], ...] = (
    # listeners on a free port; documented ones have four digits
    (r"\b(127\.0\.0\.1|localhost):[1-9]\d{4}\b", r"\1:<port>"),
    (r"\b(vw-[a-z0-9_-]+?)-[A-Za-z0-9_-]{32}(?![A-Za-z0-9_-])", r"\1-<key>"),
    (r"\bsha256:[0-9a-f]{64}\b", "sha256:<hash>"),
    (r"\b[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT\b", "<now>"),
)
# The last digits of a sum depend on its order, and on the release of Python.
_DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?:e[+-]?\d+)?(?![\w.])")
DIGITS = 12
_ASSET = re.compile(r"(<(script|style)\b(?![^>]*json)[^>]*>)((?:(?!</\2>).){1000,})(</\2>)", re.DOTALL)
_TIME = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:\.\d+)?)?(Z|\+00:00)?")
_UNIX = re.compile(r"\b(1[5-9]\d{8})(\d{3})?(\.\d+)?\b")


@dataclass(frozen=True)
class Normaliser:
    """Replaces what differs. folders: names by path, the inner ones first; rules: patterns and replacements of an
    entry."""

    folders: Mapping[str, str]
    rules: Sequence[Sequence[str]] = ()
    started_s: float = field(default_factory=time.time)

    def __call__(self, text: str) -> str:
        for folder, name in self.folders.items():
            text = re.sub(rf"{re.escape(folder)}(?![\w-])", name, text)
        for pattern, replacement in (*self.rules, *_FIXED):
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        return _UNIX.sub(self._unix, _TIME.sub(self._time, _DECIMAL.sub(_rounded, text)))

    def _time(self, match: re.Match[str]) -> str:
        try:
            parts = [int(part or 0) for part in match.groups()[:6]]
            at_s = datetime.datetime(*parts, tzinfo=datetime.UTC).timestamp()  # type: ignore[misc,arg-type]
        except ValueError:
            return match[0]
        return "<now>" if self._near(at_s) else match[0]

    def _unix(self, match: re.Match[str]) -> str:
        return "<now>" if self._near(float(match[1])) else match[0]

    def _near(self, at_s: float) -> bool:
        return self.started_s - NEAR_S <= at_s <= time.time() + NEAR_S


def _rounded(match: re.Match[str]) -> str:
    mantissa = match[0].partition("e")[0]
    return (
        repr(float(f"{float(match[0]):.{DIGITS}g}"))
        if len(mantissa.replace(".", "").lstrip("0")) > DIGITS
        else match[0]
    )


def objects(name: str, text: str) -> Any:
    """Return what a JSON or YAML file holds, several objects sorted by kind and name. Raises ValueError for another."""
    if name.endswith(".json"):
        return json.loads(text)
    if not name.endswith((".yaml", ".yml")):
        raise ValueError(f"{name} is neither JSON nor YAML")
    documents = [one for one in yaml.load_all(text, Loader=_Loader) if one is not None]
    return documents[0] if len(documents) == 1 else sorted(documents, key=_identity)


class _Loader(yaml.CSafeLoader):
    """Reads plain YAML and the tags of compose files, such as !reset."""


_Loader.add_multi_constructor("!", lambda loader, tag, node: {f"!{tag}": _plain(loader, node)})


def _plain(loader: Any, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else node.value


def _identity(one: Any) -> tuple[str, ...]:
    meta = one.get("metadata", {}) if isinstance(one, dict) else {}
    return (
        (str(one.get("kind", "")), str(meta.get("namespace", "")), str(meta.get("name", ""))) if meta else (str(one),)
    )


def with_references(value: Any, known: Mapping[str, str], name: str = "") -> Any:
    """Return a parsed value whose embedded documents are parsed as well. known: names of documents by their canonical
    text; such a document is named instead of repeated, and another large one is hashed. name: key of the value."""
    if isinstance(value, dict):
        if seen := known.get(canonical(value)):
            return f"= {seen}"
        return {key: with_references(item, known, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [with_references(item, known) for item in value]
    if not isinstance(value, str) or ("\n" not in value and not name.endswith((".json", ".yaml", ".yml"))):
        return value
    with contextlib.suppress(ValueError, yaml.YAMLError):
        parsed = objects(name, value)
        text = canonical(parsed)
        return f"sha256 {digest(text)}" if len(text) > LARGE and text not in known else with_references(parsed, known)
    return value.splitlines()


def digest(text: str) -> str:
    """Return the beginning of a SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical(value: Any) -> str:
    """Return the one text of a parsed value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def readable(value: Any, depth: int = 0) -> str:
    """Return a parsed value as sorted JSON; what fits into a line stands in one."""
    flat = canonical(value)
    if not isinstance(value, dict | list) or depth + len(flat) <= LINE:
        return flat
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {readable(value[key], depth + 1)}" for key in sorted(value)]
    else:
        items = [readable(item, depth + 1) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join((opening, ",\n".join(f"{' ' * (depth + 1)}{item}" for item in items), f"{' ' * depth}{closing}"))


def without_assets(page: str) -> str:
    """Return an HTML page with a hash in place of each long script and style, which are files of their own."""
    return _ASSET.sub(lambda match: f"{match[1]}sha256 {digest(match[3])}{match[4]}", page)

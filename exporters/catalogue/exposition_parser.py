"""Parser for the /metrics exposition format. Text is untrusted: an error names the line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


class BadExposition(ValueError):
    """Text that is not a Prometheus exposition."""


@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples by sample name (`..._bucket` and the like separately), and the declared kind of each family."""

    samples: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def of(self, name: str) -> list[tuple[Labels, float]]:
        return self.samples.get(name, [])

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples that have these labels; None if there are none."""
        found = [
            value for sample_labels, value in self.of(name) if all(sample_labels.get(k) == v for k, v in labels.items())
        ]
        return sum(found) if found else None

    def families(self) -> Iterator[str]:
        """Yield family names as in the catalogue: counters with _total, histograms without suffix, no `_created`."""
        seen: set[str] = set()
        for name in self.samples:
            family = self._family(name)
            if family and family not in seen:
                seen.add(family)
                yield family

    def _family(self, name: str) -> str | None:
        for suffix in ("_bucket", "_count", "_sum", "_created"):
            stem = name.removesuffix(suffix)
            if stem != name:
                if suffix == "_created" and (stem in self.kinds or f"{stem}_total" in self.samples):
                    return None
                if self.kinds.get(stem) in ("histogram", "summary"):
                    return stem
        return name


def parse(text: str) -> Exposition:
    """Parse an exposition in the Prometheus text format (OpenMetrics is close enough). Raises BadExposition."""
    return Parser().parse(text)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Exposition text without its numbers.

    heads: the text before the number of each line; the full line where there is no number. fixed_lines: indices of
    the latter. places: line and column of each number, grouped by sample name. groups: sample name and labels of
    each run of places. underscores: their count in the heads, because float() accepts 1_0 and an exposition must not
    hold it."""

    heads: tuple[str, ...]
    fixed_lines: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    groups: tuple[tuple[str, tuple[Labels, ...]], ...]
    kinds: Mapping[str, str]
    underscores: int

    def read(self, text: str) -> Exposition | None:
        """Return the exposition if the text has this layout, else None."""
        lines = text.split("\n")
        if (
            len(lines) != len(self.heads)
            or not all(map(str.startswith, lines, self.heads))
            or text.count("_") != self.underscores
        ):
            return None
        if any(len(lines[at]) != len(self.heads[at]) for at in self.fixed_lines):
            return None
        try:
            values = iter([float(lines[at][column:]) for at, column in self.places])
        except ValueError:
            return None
        return Exposition({name: list(zip(labels, values, strict=False)) for name, labels in self.groups}, self.kinds)


def _layout(
    exposition: Exposition,
    underscores: int,
    heads: list[str],
    fixed_lines: list[int],
    places: Mapping[str, list[tuple[int, int]]],
) -> _Layout:
    return _Layout(
        heads=tuple(heads),
        fixed_lines=tuple(fixed_lines),
        places=tuple(place for run in places.values() for place in run),
        groups=tuple((name, tuple(labels for labels, _ in rows)) for name, rows in exposition.samples.items()),
        kinds=exposition.kinds,
        underscores=underscores,
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Name and label names of a series, and the text outside its quotes."""

    name: str
    labels: tuple[str, ...]
    outside: list[str]


class Parser:
    """Parser for successive scrapes of one target.

    If a scrape has the layout of the previous one, only the numbers are read, in a thirtieth of the time. Samples in
    the usual form are parsed here; prometheus_client decides on every other line. Invariant: scrapes share their
    label dicts, so callers must not modify them."""

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._shapes: dict[str, _Shape] = {}  # by the text before the first quote

    def parse(self, text: str) -> Exposition:
        """Parse one scrape. Raises BadExposition."""
        return (self._layout and self._layout.read(text)) or self._parse(text)

    def _parse(self, text: str) -> Exposition:
        found: dict[str, list[tuple[Labels, float]]] = {}
        places: dict[str, list[tuple[int, int]]] = {}
        heads = text.split("\n")
        fixed_lines: list[int] = []
        kinds: dict[str, str] = {}
        bare = ""  # counter declared without _total, while its samples follow; prometheus_client adds it
        regular = True
        for at, line in enumerate(heads):
            try:
                if not (stripped := line.strip()) or stripped[0] == "#":
                    fixed_lines.append(at)
                    if stripped:
                        bare = _bare_after(stripped, kinds, bare)
                    continue
                name, labels, value, head = self._sample(stripped)
            except (ValueError, KeyError, IndexError) as error:
                raise BadExposition(f"not a Prometheus exposition: line {at + 1} is {line[:60]!r}") from error
            if bare and name == bare:
                name += "_total"
            else:
                bare = ""
            if name not in found:
                found[name], places[name] = [], []
            found[name].append((labels, value))
            if head and line.startswith(head):
                heads[at] = head
                places[name].append((at, len(head)))
            else:
                regular = False
        if not found:
            raise BadExposition("no samples found; is this the URL of a /metrics endpoint?")
        exposition = Exposition(found, kinds)
        if regular:
            self._layout = _layout(exposition, text.count("_"), heads, fixed_lines, places)
        return exposition

    def _sample(self, line: str) -> tuple[str, Labels, float, str]:
        """Return name, labels and value of a line, and the text before the value if nothing follows it."""
        if len(line) > _LINE_AT_MOST:
            raise ValueError(f"{len(line)} characters")
        series, _, written = line.rpartition(" ")
        value = _number(written)
        if value is not None:
            if read := self._series(series):
                return *read, value, series + " "
            series, _, before = series.rpartition(" ")
            if (first := _number(before)) is not None and (read := self._series(series)):
                return *read, first, ""  # a timestamp follows the value
        (family,) = text_string_to_metric_families(line)
        (sample,) = family.samples
        alone = value is not None and sample.timestamp is None
        return sample.name, sample.labels, float(sample.value), line[: -len(written)] if alone else ""

    def _series(self, text: str) -> tuple[str, Labels] | None:
        """Return name and labels of a series without escapes in its labels; None for any other text.

        The text outside the quotes is the same for all series of a metric, so it is parsed once."""
        if "\\" in text:
            return None
        parts = text.split('"')
        outside = parts[::2]
        shape = self._shapes.get(outside[0])
        if shape is None or shape.outside != outside:
            if (shape := _shape(outside)) is None:
                return None
            if len(self._shapes) >= _SHAPES_AT_MOST:
                self._shapes.clear()
            self._shapes[outside[0]] = shape
        return (shape.name, dict(zip(shape.labels, parts[1::2], strict=True))) if len(parts) % 2 else None


_SHAPES_AT_MOST = 10_000
# characters of a sample; prometheus_client is quadratic in the line length if quotes are escaped
_LINE_AT_MOST = 16 << 10
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r"[a-zA-Z_][a-zA-Z0-9_]*"
_SHAPE = re.compile(rf'({_NAME})(?:\{{((?:{_LABEL}="",)*(?:{_LABEL}="")?)\}})?')
_DECLARED = re.compile(
    rf"# (?:(HELP) ({_NAME})( .*)?|(TYPE) ({_NAME}) (counter|gauge|histogram|summary|unknown|untyped))"
)
_KIND = re.compile(r"# TYPE (\S+) (\w+)")


def _shape(outside: list[str]) -> _Shape | None:
    """Return the series for the text outside its quotes; None if that is not the usual form."""
    found = _SHAPE.fullmatch('""'.join(outside))
    if not found:
        return None
    labels = tuple(re.findall(_LABEL, found[2] or ""))
    return None if len(set(labels)) != len(labels) or "__name__" in labels else _Shape(found[1], labels, outside)


def _number(text: str) -> float | None:
    """Parse a sample value. float() also accepts 1_0, which is not valid here."""
    if "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _bare_after(comment: str, kinds: dict[str, str], bare: str) -> str:
    """Record the kind that a comment declares, and return the counter without _total whose samples may follow.

    Returns "" if there is none. Raises ValueError."""
    declared = _declared(comment)
    if not declared:
        return bare
    word, name, kind = declared
    if word == "TYPE":
        kinds[name] = kind
        return name if kind == "counter" and not name.endswith("_total") else ""
    return bare if name == bare else ""


def _declared(comment: str) -> tuple[str, str, str] | None:
    """Return the declaration in a comment: (TYPE or HELP, name, kind). Raises ValueError if malformed."""
    if usual := _DECLARED.fullmatch(comment):
        return (usual[1], usual[2], "") if usual[1] else (usual[4], usual[5], usual[6])
    list(text_string_to_metric_families(comment))
    kind = _KIND.fullmatch(comment)
    return ("TYPE", kind[1], kind[2]) if kind else None

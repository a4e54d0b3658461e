"""A scraped /metrics page as values. The text is trusted to no one: a page that does not parse names the line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


class BadExposition(ValueError):
    """Text that is no exposition page."""


@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples by sample name (`..._bucket` and the rest apart), and the declared kind of each family."""

    samples: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def of(self, name: str) -> list[tuple[Labels, float]]:
        return self.samples.get(name, [])

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of the samples that carry these labels; None when there is none."""
        found = [value for its, value in self.of(name) if all(its.get(k) == v for k, v in labels.items())]
        return sum(found) if found else None

    def families(self) -> Iterator[str]:
        """Family names as the catalogue writes them: counters with _total, histograms without a suffix; `_created` left
        out."""
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
    """A page in the Prometheus text format (OpenMetrics text is near enough). Raises BadPage."""
    return Parser().parse(text)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A page but for its numbers. heads: of each line what stands before the number, of those without one the whole
    line.

    still: which lines these are. places: line and column of every number, those of one sample name together. groups:
    sample name and labels of each run of places. underscores: how many there are in the heads, since float() reads 1_0
    and a page may not hold it."""

    heads: tuple[str, ...]
    still: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    groups: tuple[tuple[str, tuple[Labels, ...]], ...]
    kinds: Mapping[str, str]
    underscores: int

    def read(self, text: str) -> Exposition | None:
        """The page, if it has this layout."""
        lines = text.split("\n")
        if (
            len(lines) != len(self.heads)
            or not all(map(str.startswith, lines, self.heads))
            or text.count("_") != self.underscores
        ):
            return None
        if any(len(lines[at]) != len(self.heads[at]) for at in self.still):
            return None
        try:
            values = iter([float(lines[at][column:]) for at, column in self.places])
        except ValueError:
            return None
        return Exposition({name: list(zip(labels, values, strict=False)) for name, labels in self.groups}, self.kinds)


def _layout(
    page: Exposition, underscores: int, heads: list[str], still: list[int], places: Mapping[str, list[tuple[int, int]]]
) -> _Layout:
    return _Layout(
        heads=tuple(heads),
        still=tuple(still),
        places=tuple(place for its in places.values() for place in its),
        groups=tuple((name, tuple(labels for labels, _ in rows)) for name, rows in page.samples.items()),
        kinds=page.kinds,
        underscores=underscores,
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Name and label names of a series, and what stands outside its quotes."""

    name: str
    labels: tuple[str, ...]
    outside: list[str]


class Parser:
    """Reads the pages of one source, one after another. Of a page like the last one only the numbers are read, in a
    thirtieth of the time.

    Samples of the usual form are read here, and every other line is left to prometheus_client: what is sound and what
    is not is its word.
    Pages share their labels: nobody may change them."""

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._shapes: dict[str, _Shape] = {}  # by what stands before the first quote

    def parse(self, text: str) -> Exposition:
        """Raises BadPage."""
        return (self._layout and self._layout.read(text)) or self._parse(text)

    def _parse(self, text: str) -> Exposition:
        found: dict[str, list[tuple[Labels, float]]] = {}
        places: dict[str, list[tuple[int, int]]] = {}
        heads = text.split("\n")
        still: list[int] = []
        kinds: dict[str, str] = {}
        bare = ""  # a counter declared without _total, while its samples follow; prometheus_client names these with it
        regular = True
        for at, line in enumerate(heads):
            try:
                if not (stripped := line.strip()) or stripped[0] == "#":
                    still.append(at)
                    if stripped:
                        bare = _bare_after(stripped, kinds, bare)
                    continue
                name, labels, value, head = self._sample(stripped)
            except (ValueError, KeyError, IndexError) as error:
                raise BadExposition(f"this is no Prometheus metrics page: line {at + 1} is {line[:60]!r}") from error
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
            raise BadExposition("this page holds no samples; is it the address of /metrics?")
        page = Exposition(found, kinds)
        if regular:
            self._layout = _layout(page, text.count("_"), heads, still, places)
        return page

    def _sample(self, line: str) -> tuple[str, Labels, float, str]:
        """Name, labels and value of a line, and what stands before the value, if nothing follows it."""
        if len(line) > _LINE_AT_MOST:
            raise ValueError(f"{len(line)} characters")
        series, _, written = line.rpartition(" ")
        value = _number(written)
        if value is not None:
            if read := self._series(series):
                return *read, value, series + " "
            series, _, before = series.rpartition(" ")
            if (first := _number(before)) is not None and (read := self._series(series)):
                return *read, first, ""  # what follows the value is its time
        (family,) = text_string_to_metric_families(line)
        (sample,) = family.samples
        alone = value is not None and sample.timestamp is None
        return sample.name, sample.labels, float(sample.value), line[: -len(written)] if alone else ""

    def _series(self, text: str) -> tuple[str, Labels] | None:
        """Name and labels of a series whose labels hold no escapes; None for any other text.

        What stands outside the quotes is the same for all series of a metric, so that it is looked at once."""
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
# characters of a sample; prometheus_client takes the square of a line's length where quotes in it are escaped
_LINE_AT_MOST = 16 << 10
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r"[a-zA-Z_][a-zA-Z0-9_]*"
_SHAPE = re.compile(rf'({_NAME})(?:\{{((?:{_LABEL}="",)*(?:{_LABEL}="")?)\}})?')
_DECLARED = re.compile(
    rf"# (?:(HELP) ({_NAME})( .*)?|(TYPE) ({_NAME}) (counter|gauge|histogram|summary|unknown|untyped))"
)
_KIND = re.compile(r"# TYPE (\S+) (\w+)")


def _shape(outside: list[str]) -> _Shape | None:
    """A series from what stands outside its quotes; None where that is not the usual form, sound or not."""
    found = _SHAPE.fullmatch('""'.join(outside))
    if not found:
        return None
    labels = tuple(re.findall(_LABEL, found[2] or ""))
    return None if len(set(labels)) != len(labels) or "__name__" in labels else _Shape(found[1], labels, outside)


def _number(text: str) -> float | None:
    """As a page may write it: float() takes 1_0 as well."""
    if "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _bare_after(comment: str, kinds: dict[str, str], bare: str) -> str:
    """Note the kind that a comment declares. The counter without _total whose samples may follow, "" where there is
    none. Raises ValueError."""
    declared = _declared(comment)
    if not declared:
        return bare
    word, name, kind = declared
    if word == "TYPE":
        kinds[name] = kind
        return name if kind == "counter" and not name.endswith("_total") else ""
    return bare if name == bare else ""


def _declared(comment: str) -> tuple[str, str, str] | None:
    """What a comment says of a family: (TYPE or HELP, its name, its kind). Raises ValueError where it says nothing
    sound."""
    if usual := _DECLARED.fullmatch(comment):
        return (usual[1], usual[2], "") if usual[1] else (usual[4], usual[5], usual[6])
    list(text_string_to_metric_families(comment))
    kind = _KIND.fullmatch(comment)
    return ("TYPE", kind[1], kind[2]) if kind else None

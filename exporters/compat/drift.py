"""Differences between a vLLM and the catalogue, and the catalogue edits that resolve them.

A scrape shows what one engine exposes: kinds, labels, bounds, help. vLLM's source shows what any flag could add
(source_scan.py). The catalogue has no help texts and bounds because releases change them; these are compared with an
earlier scrape."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from exporters.catalogue import exposition_parser, promql_ast, vllm
from exporters.catalogue.metric import Kind, Metric, Unit, key
from exporters.compat.check import ENGINE, QueryRef
from exporters.compat.source_scan import SourceFamily, SourceScan

CATALOGUE: tuple[Metric, ...] = (*vllm.VLLM, *vllm.RETIRED, *vllm.BESIDE)
LIKE = 0.6  # minimum name similarity (difflib ratio) of a renamed family
# Families excluded from the catalogue, by name prefix: no dashboard or alert uses them.
LEFT_OUT: Mapping[str, str] = {
    "vllm:hisparse_": "the HiSparse connector",
    "vllm:kv_offload_tiering_": (
        "tiers below the CPU cache: they change with each release; the three most useful are listed"
    ),
    "vllm:nixl_num_notifications_": "internals of NIXL; failed transfers and expired requests are listed",
    "vllm:rl_weight_update_": "weight updates by a trainer, not serving",
    "vllm:simple_kv_offload_": "the SimpleCPUOffloadConnector",
    "vllm:sleep_mode_": "duration of sleep and wake-up; engine_sleep_state is listed",
    "vllm:watermark_": "only with a watermark configuration",
}
_DEFAULT_LABELS = ("engine", "model_name")
_UNITS = {
    "seconds": "SECONDS",
    "bytes": "BYTES",
    "tokens": "TOKENS",
    "perc": "RATIO",
    "ratio": "RATIO",
    "blocks": "BLOCKS",
    "requests": "REQUESTS",
    "reqs": "REQUESTS",
    "info": "NONE",
}


@dataclass(frozen=True, slots=True)
class ObservedVllm:
    """Families observed in a vLLM.

    complete: includes families of any flag, so that missing ones are gone; otherwise only families without a flag
    are expected. release: None if unknown, else like 0.32.0. unread: places with metric names built at run time.
    openmetrics: the scrape ends as OpenMetrics does."""

    families: Mapping[str, SourceFamily]
    release: str | None = None
    complete: bool = False
    unread: tuple[str, ...] = ()
    openmetrics: bool = False

    @property
    def is_rust_frontend(self) -> bool:
        """True for the Rust frontend: OpenMetrics without negotiation, and none of the families it lacks."""
        return self.openmetrics and self.families.keys().isdisjoint(
            metric.name for metric in CATALOGUE if vllm.NOT_RUST in metric.notes
        )


class _Sorted(NamedTuple):
    """Families by name: exposed, unknown to the catalogue, missing from the exposition, and renamed (old -> new)."""

    shown: dict[str, SourceFamily]
    new: dict[str, SourceFamily]
    gone: dict[str, Metric]
    renamed: dict[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. what: new, gone, renamed, kind, labels, release, bounds or help; was, now: before and as found.

    advice: what to change; paste: a catalogue entry, if one is missing; places: panels, alerts and recordings that
    read the family."""

    what: str
    name: str
    was: str
    now: str
    advice: str
    paste: str = ""
    places: tuple[str, ...] = ()


def from_scrape(text: str, release: str | None = None) -> ObservedVllm:
    """Return the families of a scrape. Raises BadExposition."""
    parsed = exposition_parser.parse(text)
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    declared = {
        f"{name}_total" if kind == "counter" and not name.endswith("_total") else name: kind
        for name, kind in parsed.kinds.items()
    }
    names = {*parsed.families(), *declared}
    # creation times, not useful in queries
    twins = {f"{stem}_created" for name in names for stem in (name, name.removesuffix("_total"))}
    families = {name: _shown(name, declared.get(name, ""), parsed, helps) for name in sorted(names - twins)}
    return ObservedVllm(families, release, openmetrics=text.rstrip().endswith("# EOF"))


def _shown(name: str, kind: str, parsed: exposition_parser.Exposition, helps: Mapping[str, str]) -> SourceFamily:
    rows = [labels for part in ("", "_bucket", "_count", "_sum") for labels, _ in parsed.of(name + part)]
    help_text = helps.get(name) or helps.get(name.removesuffix("_total"), "")
    bounds = tuple(sorted({float(labels["le"]) for labels in rows if "le" in labels}))
    labels = tuple(sorted({label for labels in rows for label in labels} - {"le", "quantile"}))
    return SourceFamily(name, kind, labels if rows else None, help_text, bounds or None, "page")


def from_source(source: SourceScan, release: str | None = None) -> ObservedVllm:
    """Return the families that an installed vLLM could expose."""
    return ObservedVllm(source.families, release, complete=True, unread=source.unread)


def drift(
    found: ObservedVllm,
    catalogue: Iterable[Metric] = CATALOGUE,
    uses: Iterable[QueryRef] = (),
    before: ObservedVllm | None = None,
) -> tuple[Change, ...]:
    """Return every difference, sorted by family name; empty if the catalogue is up to date.

    before: an earlier scrape, for differences between two scrapes. Unknown families of other programs are ignored."""
    by_name = {metric.name: metric for metric in catalogue}
    shown, new, gone, renamed = _sorted(found, by_name)
    changes = [
        *(_rename(gone[old], new[name], found.release) for old, name in renamed.items()),
        *(_new(family, name, found) for name, family in new.items() if name not in renamed.values()),
        *(
            _gone(metric, found.release)
            for name, metric in gone.items()
            if name not in renamed and not found.is_rust_frontend
        ),
        *(
            change
            for name, family in shown.items()
            if name in by_name
            for change in _differs(by_name[name], family, found.release)
        ),
        *_between(before, found),
    ]
    queries = list(uses)
    changes.sort(key=lambda change: (change.name, change.what))
    return tuple(replace(change, places=_readers(change, by_name, queries)) for change in changes)


def unshown(found: ObservedVllm, catalogue: Iterable[Metric] = CATALOGUE) -> tuple[str, ...]:
    """Return the families missing from a Rust frontend, which exposes fewer than an engine has; else nothing.

    They may exist in the engine, so they are not reported as gone."""
    here = _sorted(found, {metric.name: metric for metric in catalogue})
    return tuple(sorted(here.gone.keys() - here.renamed.keys())) if found.is_rust_frontend else ()


def _sorted(found: ObservedVllm, by_name: Mapping[str, Metric]) -> _Sorted:
    shown = {_as_catalogued(family, by_name): family for family in found.families.values()}
    new = {
        name: family
        for name, family in shown.items()
        if name.startswith(ENGINE) and name not in by_name and not exclusion_reason(name)
    }
    release = found.release or max(
        (by_name[name].since or "0.0" for name in shown.keys() & by_name.keys()), key=key, default="0.0"
    )
    gone = {name: metric for name, metric in by_name.items() if name not in shown and _expected(metric, found, release)}
    return _Sorted(shown, new, gone, _renamed(new, gone))


def exclusion_reason(name: str) -> str:
    """Return the reason why the catalogue excludes a known family; '' for any other."""
    return next((why for beginning, why in LEFT_OUT.items() if name.startswith(beginning)), "")


def _as_catalogued(family: SourceFamily, by_name: Mapping[str, Metric]) -> str:
    """Return the family's name in the catalogue; a family of unknown kind may be a counter of ours."""
    counter = f"{family.name}_total"
    return counter if not family.kind and family.name not in by_name and counter in by_name else family.name


def _expected(metric: Metric, found: ObservedVllm, release: str) -> bool:
    """Return True if the exposition should have this metric.

    release: the engine's, or if unknown the newest `since` among the exposed families: the engine is at least that
    new."""
    if not metric.name.startswith(ENGINE) or (metric.needs and not found.complete):
        return False
    return metric.lives_in(release) and (found.release is not None or metric.until is None)


def _renamed(new: Mapping[str, SourceFamily], gone: Mapping[str, Metric]) -> dict[str, str]:
    """Return old name -> new name for pairs of equal kind and labels, most similar first."""
    pairs = [
        (difflib.SequenceMatcher(None, old, name).ratio(), old, name)
        for old, metric in gone.items()
        for name, family in new.items()
        if family.kind in ("", _kind(metric)) and (family.labels is None or _labels_agree(metric, family.labels))
    ]
    found: dict[str, str] = {}
    for ratio, old, name in sorted(pairs, reverse=True):
        if ratio >= LIKE and old not in found and name not in found.values():
            found[old] = name
    return found


def _kind(metric: Metric) -> str:
    """Return the kind as an exposition declares it."""
    return "gauge" if metric.kind is Kind.INFO else str(metric.kind)


def _rename(metric: Metric, family: SourceFamily, release: str | None) -> Change:
    successor = replace(
        metric, name=family.name, since=_short(release) or metric.since, formerly=(metric.name, *metric.formerly)
    )
    advice = (
        f"if it is the same quantity: add the entry below, and move {metric.name} to the retired ones with"
        f" {_until(release)}"
    )
    return Change("renamed", metric.name, metric.name, family.name, advice, entry(successor))


def _new(family: SourceFamily, name: str, found: ObservedVllm) -> Change:
    description = f"{family.kind or 'of unknown kind'}, {family.where}"
    advice = (
        "add the entry below to exporters/catalogue/vllm.py, with its meaning, the flag that enables it, and a note"
    )
    return Change("new", name, "", description, advice, entry(suggested(family, found)))


def _gone(metric: Metric, release: str | None) -> Change:
    return Change(
        "gone",
        metric.name,
        f"since {metric.since or '?'}",
        "",
        f"give it {_until(release)}, or `needs` if a flag enables it",
    )


def _until(release: str | None) -> str:
    return f"`until={_quoted(_short(release) or 'RELEASE')}`"


def _differs(metric: Metric, family: SourceFamily, release: str | None) -> Iterator[Change]:
    if family.kind and family.kind != _kind(metric):
        yield Change(
            "kind", metric.name, _kind(metric), family.kind, f"set `Kind.{family.kind.upper()}`, and update its queries"
        )
    if family.labels is not None and not _labels_agree(metric, family.labels):
        yield Change(
            "labels",
            metric.name,
            ", ".join(metric.labels),
            ", ".join(family.labels),
            f"set `labels={_tuple(family.labels)}`",
        )
    if release and not metric.lives_in(release):
        lived = f"{metric.since or '?'} .. {metric.until or ''}"
        yield Change("release", metric.name, lived, release, f"exposed in {release}: move `since` or `until`")


def _labels_agree(metric: Metric, found: tuple[str, ...]) -> bool:
    """Compare label sets. An info family may have more labels than the catalogue uses."""
    return set(metric.labels) <= set(found) if metric.kind is Kind.INFO else set(metric.labels) == set(found)


def _between(before: ObservedVllm | None, found: ObservedVllm) -> Iterator[Change]:
    """Yield differences between two scrapes for the families that both have."""
    for name, then in (before.families if before else {}).items():
        now = found.families.get(name)
        if now and then.bounds and now.bounds and then.bounds != now.bounds:
            advice = "check that no threshold or SLO uses a removed bound, and check exporters/catalogue/bounds.py"
            yield Change("bounds", name, _listed(then.bounds, now.bounds), _listed(now.bounds, then.bounds), advice)
        if now and then.help and now.help and then.help != now.help:
            yield Change(
                "help", name, then.help, now.help, "check whether the meaning changed; then update meaning and notes"
            )


def _listed(bounds: tuple[float, ...], other: tuple[float, ...]) -> str:
    """Format the bounds that `other` lacks."""
    return ", ".join(f"{bound:g}" for bound in bounds if bound not in other) or "no others"


def _readers(change: Change, by_name: Mapping[str, Metric], uses: Iterable[QueryRef]) -> tuple[str, ...]:
    """Return the queries that read the family, in order. A help text changes no query."""
    metric = by_name.get(change.name)
    if metric is None or change.what == "help":
        return ()
    own = {sample for sample in metric.samples if sample.startswith(metric.name)}
    return tuple(dict.fromkeys(use.place for use in uses if own & _names(use.expr)))


def _names(expr: str) -> set[str]:
    try:
        return set(promql_ast.names(expr))
    except promql_ast.BadExpression:
        return set()


def suggested(family: SourceFamily, found: ObservedVllm) -> Metric:
    """Return a draft catalogue entry: kind, labels and help as found, unit guessed from the name.

    The rest is for a person to write."""
    kind = (
        Kind(family.kind)
        if family.kind in list(Kind)
        else Kind.COUNTER
        if family.name.endswith("_total")
        else Kind.GAUGE
    )
    words = family.name.removesuffix("_total").split("_")
    unit = next((Unit[_UNITS[word]] for word in reversed(words) if word in _UNITS), Unit.COUNT)
    meaning = family.help.strip() or f"TODO: meaning; named in {family.where}."
    return Metric(
        name=family.name,
        kind=kind,
        unit=unit,
        meaning=meaning[0].upper() + meaning[1:].rstrip(".") + ".",
        labels=family.labels if family.labels is not None else _DEFAULT_LABELS,
        since=_short(found.release),
        needs=f"TODO: flag; see {family.where}" if found.complete else "",
        notes=("TODO: pitfalls.",),
    )


def entry(metric: Metric) -> str:
    """Return the catalogue source code of a metric, ready to paste."""
    word = re.sub(r"^vllm:|_total$|_seconds$", "", metric.name)
    lines = [_quoted(metric.name), f"Kind.{metric.kind.name}", f"Unit.{metric.unit.name}", _quoted(metric.meaning)]
    lines += [f"labels={_tuple(metric.labels)}"] * (metric.labels != _DEFAULT_LABELS)
    lines += [f"across=Across.{metric.across.name}"] * (metric.across != Metric.__dataclass_fields__["across"].default)
    lines += [f"{name}={_quoted(value)}" for name in ("since", "until") if (value := getattr(metric, name))]
    lines += [f"formerly={_tuple(metric.formerly)}"] * bool(metric.formerly)
    lines += [f"needs={_quoted(metric.needs)}", "evidence=Provenance.SOURCE"] * bool(metric.needs)
    lines += [f"notes={_tuple(metric.notes)}"] * bool(metric.notes)
    body = "".join(f"    {line},\n" for line in lines)
    return f"{re.sub(r'_seconds$', '', word).upper()} = Metric(\n{body})\n"


def _short(release: str | None) -> str | None:
    """Return 0.33.0 as 0.33, as in the catalogue; a fix release keeps its third number."""
    return re.sub(r"^(\d+\.\d+)\.0$", r"\1", release) if release else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tuple(words: tuple[str, ...]) -> str:
    return f"({', '.join(map(_quoted, words))}{',' if len(words) == 1 else ''})"

"""Explanation of a request log line: its fields and its effect on the series. Pure; the command prints it.

Invariant: nothing is computed twice. The log reader interprets the line, and the counters give its effect."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from exporters.catalogue import sidecar
from exporters.exposition import Distribution
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.grouped_latency import GroupedLatency
from exporters.requests.record import BadLine, FieldMap, RequestRecord, parse_block, parse_line
from exporters.text import printable

OURS = FieldMap()  # a log with our own names
_TABLES = (sidecar.TEAMS, sidecar.TEAMS_OVERFLOW, sidecar.MODELS_OVERFLOW)


def explain(line: bytes, fields: FieldMap = OURS, counters: RequestCounters | None = None) -> dict[str, Any]:
    """Return everything about one line, as JSON-compatible values. counters: empty ones, bounded as a sidecar's.

    fields: our name, the log's name, value, unit, and the reason if rejected. ignored: unused names, with the field
    that may have been meant. absent: mapped names that the line lacks. counted: the increase of each series, as if
    it were the first line."""
    records, bad = parse_block(line, fields)
    gains = _counted(records, counters or RequestCounters(BoundedNames(), BoundedNames()))
    report: dict[str, Any] = {
        "refused": {"reason": bad[0][1].reason, "why": str(bad[0][1])} if bad else None,
        "fields": [], "ignored": [], "absent": [], "notes": [], "counted": list(gains),
    }  # fmt: skip
    if bad and records:
        rest = "of the record is counted" if bad[0][1].record else "after the break is a record, and is counted"
        report["notes"].append(f"the rest {rest}")
    if len(records) > 1:
        report["notes"].append("the line holds two records; both are counted")
    report["notes"] += [note for record in records for note in _notes(record)]
    try:
        found, names = fields.extract(line), list(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return report
    report["fields"] = [_field(name, *found[name]) for name in RequestRecord.__struct_fields__ if name in found]
    read = {foreign_name for foreign_name, _ in found.values()}
    report["ignored"] = [
        {"name": name, "near": _near(name, found) if name not in fields.names else None}
        for name in names
        if name not in read and not any(foreign_name.startswith(f"{name}.") for foreign_name in read)
    ]
    report["absent"] = [
        {"name": lead.foreign_name, "field": lead.ours} for lead in fields.leads if lead.ours not in found
    ]
    if "request_id" not in found:
        report["notes"].append(
            "every record needs a request_id; where yours has another name: field_names: {their_name: request_id}"
        )
    return report


def _field(name: str, foreign_name: str, value: Any) -> dict[str, Any]:
    why = None
    try:
        parse_line(msgspec.json.encode({"request_id": "", name: value}))
    except BadLine as error:
        why = str(error).removesuffix(f" - at `$.{name}`")
    return {"field": name, "from": foreign_name, "value": value, "unit": unit(name), "refused": why}


def unit(name: str) -> str:
    """Return the unit of one of our fields; empty if none."""
    return next(
        (symbol for ending, symbol in (("_ms", "ms"), ("_s", "s"), ("_tokens", "tokens")) if name.endswith(ending)), ""
    )


def _near(name: str, found: dict[str, Any]) -> str | None:
    """Return the missing field that a name may have meant."""
    plain = {one.replace("_", ""): one for one in RequestRecord.__struct_fields__ if one not in found}
    near = difflib.get_close_matches(name.replace("_", "").replace("-", "").lower(), plain, 1, 0.8)
    return plain[near[0]] if near else None


def _notes(record: RequestRecord) -> Iterator[str]:
    if record.ts is None:
        yield f"no ts: the read time is used, and the line is counted in {sidecar.LOG_UNTIMED.name}"
    if record.team is None:
        yield "no team: counted as __unknown__"
    if record.model is None:
        yield "no model: counted as __unknown__"
    if record.outcome is None:
        guess = "; status is not used for it, map it with field_values" if record.status is not None else ""
        yield f"no outcome: counted as unknown{guess}"


def _counted(records: Iterable[RequestRecord], traffic: RequestCounters) -> Iterator[dict[str, Any]]:
    """Return the increase of each series by these records."""
    grouped = GroupedLatency()
    for record in records:
        traffic.add(record)
        grouped.add_all((record,))
    for metric, labels, value in (*traffic.samples(), *grouped.samples()):
        observed = isinstance(value, Distribution)
        amount = value.sum if isinstance(value, Distribution) else value
        if metric not in _TABLES and (observed or amount):
            how = "observes" if observed else "grows by"
            yield {
                "series": metric.name,
                "labels": dict(labels),
                "how": how,
                "amount": amount,
                "unit": str(metric.unit),
                "meaning": metric.meaning,
            }


def as_text(report: dict[str, Any]) -> str:
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    if report["refused"]:
        yield (
            f'bad line, counted in {sidecar.LOG_BAD_LINES.name}{{reason="{report["refused"]["reason"]}"}}:'
            f" {report['refused']['why']}"
        )
    else:
        yield "a request record"
    rows = [(f["field"], f"{_shown(f['value'])} {f['unit']}".rstrip(), _from(f)) for f in report["fields"]]
    wide = [min(40, max(map(len, column))) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip()
    if report["ignored"]:
        yield "ignored: " + ", ".join(
            printable(i["name"]) + (f" (did you mean {i['near']}?)" if i["near"] else "") for i in report["ignored"]
        )
    if report["absent"]:
        yield "mapped but not in this line: " + ", ".join(f"{a['name']} ({a['field']})" for a in report["absent"])
    yield from report["notes"]
    if report["counted"]:
        yield "counts:"
    for gain in report["counted"]:
        labels = ",".join(f"{name}={json.dumps(value)}" for name, value in gain["labels"].items())
        yield f"  {gain['series']}{{{labels}}} {gain['how']} {gain['amount']:g} {gain['unit']}"
        yield f"      {gain['meaning']}"


def _from(one: dict[str, Any]) -> str:
    origin = "" if one["from"] == one["field"] else f"from {printable(one['from'])}"
    return f"{origin}  <- {one['refused']}".strip() if one["refused"] else origin


def _shown(value: Any) -> str:
    """Return a value as JSON without terminal control characters, truncated if long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

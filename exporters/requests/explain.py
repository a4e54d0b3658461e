"""What becomes of a line of a request log: field by field, and in the series. Pure; the command prints it.

Law: nothing here is worked out a second time. What a line means is asked of the reader of logs, and what it adds to the
page of the counter."""

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
from exporters.requests.record import BadLine, FieldMap, RequestRecord, parse_block, parse_line
from exporters.text import printable

OURS = FieldMap()  # a log with our own names
_TABLES = (sidecar.TEAMS, sidecar.TEAMS_OVERFLOW, sidecar.MODELS_OVERFLOW)


def explain(line: bytes, fields: FieldMap = OURS, counters: RequestCounters | None = None) -> dict[str, Any]:
    """Everything about one line, as JSON can hold it. counters: empty ones, as a sidecar bounds them.

    fields: ours, their name, value and unit, and why it is refused where it is. ignored: what nobody reads, with the
    name of ours that it may have meant. absent: mapped names that the line has not. counted: what each series gains, as
    if it were the first line."""
    records, bad = parse_block(line, fields)
    gains = _counted(records, counters or RequestCounters(BoundedNames(), BoundedNames()))
    told: dict[str, Any] = {
        "refused": {"reason": bad[0][1].reason, "why": str(bad[0][1])} if bad else None,
        "fields": [], "ignored": [], "absent": [], "notes": [], "counted": list(gains),
    }  # fmt: skip
    if bad and records:
        told["notes"].append("what follows the break is a record, and is counted")
    if len(records) > 1:
        told["notes"].append("two records stand on this line, and both are counted")
    told["notes"] += [note for record in records for note in _notes(record)]
    try:
        found, names = fields.found(line), list(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return told
    told["fields"] = [_field(name, *found[name]) for name in RequestRecord.__struct_fields__ if name in found]
    read = {theirs for theirs, _ in found.values()}
    told["ignored"] = [
        {"name": name, "near": _near(name, found) if name not in fields.names else None}
        for name in names
        if name not in read and not any(theirs.startswith(f"{name}.") for theirs in read)
    ]
    told["absent"] = [{"name": lead.theirs, "field": lead.ours} for lead in fields.leads if lead.ours not in found]
    if "request_id" not in found:
        told["notes"].append(
            "every record needs a request_id; where yours has another name: field_names: {their_name: request_id}"
        )
    return told


def _field(name: str, theirs: str, value: Any) -> dict[str, Any]:
    why = None
    try:
        parse_line(msgspec.json.encode({"request_id": "", name: value}))
    except BadLine as error:
        why = str(error).removesuffix(f" - at `$.{name}`")
    return {"field": name, "from": theirs, "value": value, "unit": unit(name), "refused": why}


def unit(name: str) -> str:
    """The unit of a field of ours, empty where it has none."""
    return next(
        (its for ending, its in (("_ms", "ms"), ("_s", "s"), ("_tokens", "tokens")) if name.endswith(ending)), ""
    )


def _near(name: str, found: dict[str, Any]) -> str | None:
    """The field that a name may have meant, among those that the line has not."""
    plain = {its.replace("_", ""): its for its in RequestRecord.__struct_fields__ if its not in found}
    near = difflib.get_close_matches(name.replace("_", "").replace("-", "").lower(), plain, 1, 0.8)
    return plain[near[0]] if near else None


def _notes(record: RequestRecord) -> Iterator[str]:
    if record.ts is None:
        yield f"no ts: the time of reading is used, and the line is counted in {sidecar.LOG_UNTIMED.name}"
    if record.team is None:
        yield "no team: counted as __unknown__"
    if record.model is None:
        yield "no model: counted as __unknown__"
    if record.outcome is None:
        guess = "; a status is not taken for one, map it with field_values" if record.status is not None else ""
        yield f"no outcome: counted as unknown{guess}"


def _counted(records: Iterable[RequestRecord], traffic: RequestCounters) -> Iterator[dict[str, Any]]:
    """What a page gains by these records."""
    for record in records:
        traffic.add(record)
    for metric, labels, value in traffic.samples():
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


def as_text(told: dict[str, Any]) -> str:
    return "\n".join(_lines(told))


def _lines(told: dict[str, Any]) -> Iterator[str]:
    if told["refused"]:
        yield (
            f'refused, and counted in {sidecar.LOG_BAD_LINES.name}{{reason="{told["refused"]["reason"]}"}}:'
            f" {told['refused']['why']}"
        )
    else:
        yield "a request record"
    rows = [(f["field"], f"{_shown(f['value'])} {f['unit']}".rstrip(), _from(f)) for f in told["fields"]]
    wide = [min(40, max(map(len, column))) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip()
    if told["ignored"]:
        yield "ignored: " + ", ".join(
            printable(i["name"]) + (f" (did you mean {i['near']}?)" if i["near"] else "") for i in told["ignored"]
        )
    if told["absent"]:
        yield "mapped but not in this line: " + ", ".join(f"{a['name']} ({a['field']})" for a in told["absent"])
    yield from told["notes"]
    if told["counted"]:
        yield "counts:"
    for gain in told["counted"]:
        labels = ",".join(f"{name}={json.dumps(value)}" for name, value in gain["labels"].items())
        yield f"  {gain['series']}{{{labels}}} {gain['how']} {gain['amount']:g} {gain['unit']}"
        yield f"      {gain['meaning']}"


def _from(one: dict[str, Any]) -> str:
    origin = "" if one["from"] == one["field"] else f"from {printable(one['from'])}"
    return f"{origin}  <- {one['refused']}".strip() if one["refused"] else origin


def _shown(value: Any) -> str:
    """A value as JSON, which leaves nothing in it for a terminal to act on; cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

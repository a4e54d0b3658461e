"""Closed months: one small file each, with the rows of every day and the prices that they were made with.

Invariant: a closed month is never written again, and a file that was changed since is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from exporters.accounting.billing_period import BillingPeriod
from exporters.accounting.cost import CostPart, SourceTotals, TeamUse, new_uses
from exporters.text import write_atomically

FORMAT = 1
BAD_SHARE = 0.001  # of the lines of a month that is closed


class ClosedRow(msgspec.Struct, frozen=True):
    """Usage of one model by one team in one part of the month."""

    from_s: float
    to_s: float
    cluster: str
    price_version: str | None
    team: str
    model: str
    use: TeamUse


class ClosedMonth(msgspec.Struct, frozen=True):
    """Content of the file of a month. digest: SHA-256 of everything else."""

    format: int
    month: str
    timezone: str
    from_s: float
    to_s: float
    closed_s: float
    source: str
    currency: str | None
    spread: tuple[str, ...]
    known: tuple[str, ...]
    price_versions: dict[str, Any]
    notes: tuple[str, ...]
    rows: tuple[ClosedRow, ...]
    method: str
    digest: str = ""


def _digest(content: bytes) -> str:
    """Return the digest of a month as JSON: of what stands there, so that a later field of a row changes no old one."""
    plain = msgspec.json.decode(content) | {"digest": ""}
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


def month_path(folder: Path, month: str) -> Path:
    return folder / f"{month}.json"


def close_month(found: SourceTotals, folder: Path, now_s: float, allow_bad_lines: bool = False) -> Path:
    """Write the file of a month that is over, and return its path. Raises ValueError, OSError.

    allow_bad_lines: close in spite of more bad lines than BAD_SHARE of the log."""
    period = found.period
    if period.month is None:
        raise ValueError("only a month is closed; name one with --month, like 2026-10")
    if now_s < period.to_s:
        raise ValueError(f"{period.month} ends at {period.show(period.to_s)}; close it after that")
    if "cost" not in found.known:
        raise ValueError(f"{period.month} has no cost, so it stays open; give --prices FILE")
    if found.bad_lines > BAD_SHARE * found.lines and not allow_bad_lines:
        raise ValueError(
            f"{period.month} stays open: {found.bad_lines:,.0f} of {found.lines:,.0f} lines of the log are bad, more"
            f" than {BAD_SHARE:.1%}, and their requests are on no bill. Repair them, or close with --allow-bad-lines."
            + "".join(f"\n{note}" for note in found.notes if " bad line" in note)
        )
    path = month_path(folder, period.month)
    content = _content(found, period.month, now_s)
    content = msgspec.structs.replace(content, digest=_digest(msgspec.json.encode(content)))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n", 0o444, once=True)
    except FileExistsError:
        raise ValueError(f"{path} exists: the month is closed, and a closed month does not change") from None
    return path


def read_month(folder: Path, month: str) -> SourceTotals | None:
    """Return the totals of a closed month, or None if it is open. Raises ValueError, OSError."""
    path = month_path(folder, month)
    try:
        text = path.read_bytes()
        content = msgspec.json.decode(text, type=ClosedMonth)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no closed month ({error}); restore it from a backup") from None
    if content.format != FORMAT or content.month != month:
        raise ValueError(f"{path} holds month {content.month} in format {content.format}, not {month} in {FORMAT}")
    if content.digest != _digest(text):
        raise ValueError(f"{path} was changed after the month was closed; restore it from a backup")
    period = BillingPeriod(content.from_s, content.to_s, content.timezone, content.month)
    found = SourceTotals(
        content.source, period, content.currency, content.method, known=set(content.known),
        price_versions=content.price_versions, spread=content.spread,
        notes=[*content.notes, f"closed at {period.show(content.closed_s)}: {path}"],
    )  # fmt: skip
    for row in content.rows:
        part = CostPart(row.from_s, row.to_s, row.cluster, row.price_version)
        found.parts.setdefault(part, new_uses())[row.team, row.model] = row.use
    return found


def _content(found: SourceTotals, month: str, now_s: float) -> ClosedMonth:
    rows = tuple(
        ClosedRow(part.from_s, part.to_s, part.cluster, part.price_version, team, model, use)
        for part, uses in found.ordered()
        for (team, model), use in sorted(uses.items())
    )
    return ClosedMonth(
        FORMAT, month, found.period.timezone, found.period.from_s, found.period.to_s, now_s, found.source,
        found.currency, found.spread, tuple(sorted(found.known)), found.price_versions, tuple(found.notes), rows,
        found.method,
    )  # fmt: skip

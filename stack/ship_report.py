"""Text of `vllm-watch ship verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from exporters.accounting.conservation import DayBalance


def as_text(day: str, balances: Sequence[DayBalance]) -> str:
    """Return the comparison of a day as aligned lines."""
    return "\n".join(_lines(day, balances))


def _lines(day: str, balances: Sequence[DayBalance]) -> Iterator[str]:
    heads = ("cluster", "model", "kind", "segments", "sidecar", "log, as engines count", "engines", "unexplained")
    rows = [
        (
            one.cluster,
            one.model,
            one.kind,
            *map(_number, (one.segments, one.sidecar, one.logged, one.engine, one.unexplained)),
        )
        for one in balances
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        left = [text.ljust(width) for text, width in zip(row[:3], widths[:3], strict=True)]
        right = [text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True)]
        yield "  ".join((*left, *right)).rstrip()
    for one in balances:
        for cause, amount in one.causes.items():
            yield f"{one.cluster} {one.model} {one.kind}: {cause}: {_number(amount)}"
    apart = sum(one.unexplained > 0 for one in balances)
    yield f"{day}: {apart} differences without a known cause" if apart else f"{day}: OK, all sums agree"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"

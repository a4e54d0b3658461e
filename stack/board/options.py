"""Variables of a dashboard: the queries for their values, and the offered choices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.interpolate import ALL, Range, fill
from dashboards.model import Variable
from stack.board.view import Choices, PanelView

MOST = 1000
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<series>.+),)?\s*(?P<label>\w+)\s*\)")


@dataclass(frozen=True, slots=True)
class LabelQuery:
    """The values of a label among series; series '': among all."""

    label: str
    series: str


def question(variable: Variable, view: PanelView, over: Range) -> LabelQuery:
    """Return the query of a variable, narrowed by the choices of those before it. Raises ValueError for any query but
    label_values."""
    found = _LABEL_VALUES.fullmatch(variable.query.strip())
    if not found:
        raise ValueError(
            f"the variable {variable.name} asks {variable.query!r}; only label_values(series, label) is understood here"
        )
    return LabelQuery(found["label"], fill((found["series"] or "").strip(), view.choices, over))


def offered(variable: Variable, values: Sequence[str], choices: Choices, error: str = "") -> dict[str, Any]:
    """One choice as the page shows it. What is chosen stays on offer, also when the range holds no such series any
    more.

    error: why nothing could be asked, or why a default stands where the address named something else. note: that the
    list was cut."""
    chosen = choices[variable.name]
    picked = [] if isinstance(chosen, str) or ALL in chosen else list(chosen)
    options = (
        sorted({value for value in values if value} | set(picked))
        if variable.kind == "query"
        else list(variable.options)
    )
    note = ""
    if len(options) > MOST:
        note = f"{MOST} of {len(options)} values; narrow the choices before this one to see others"
        options = (sorted(picked) + [value for value in options if value not in set(picked)])[:MOST]
    return {
        "name": variable.name,
        "label": variable.label,
        "kind": variable.kind,
        "options": options,
        "error": error,
        "note": note,
        "chosen": chosen if isinstance(chosen, str) else picked,
        "default": variable.default or (variable.options or ("",))[0],
    }

"""Variables of a dashboard: those that its queries read, each narrowed by those before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from alerts import fleet, recorded
from alerts.labels import TEAM
from dashboards.model import Dashboard, Variable
from exporters.catalogue import sidecar, vllm

_LABELS = {
    "cluster": "Cluster",
    "namespace": "Namespace",
    "job": "Job",
    "instance": "Engine",
    "model_name": "Model",
    "team": "Team",
}
CHAIN = tuple(_LABELS)


def of(board: Dashboard) -> tuple[Variable, ...]:
    """The variables of a board, in the order of the chain, then its own.

    Values come from a series that every engine always has (or, for boards about the request log, from the log's own),
    so that a label of other exporters never shows up among them. Where nobody has a label, the choice stays at All,
    which matches its absence. A dashboard of one team has no choice, because values would name what others use."""
    if board.team:
        return board.extra
    used = [name for name in CHAIN if board.uses(name)]
    from_log = "job" not in used and board.uses("team")
    values = _recorded if board.recorded else partial(_values, from_log=from_log)
    chain = tuple(Variable(name, _LABELS[name], query=values(name, used[: used.index(name)])) for name in used)
    return (*chain, *board.extra)


def _recorded(name: str, parents: Sequence[str]) -> str:
    """Return the variable from what is recorded of every engine, and of every team."""
    source, borne = (fleet.TEAM_REQUESTS + recorded.OVER, TEAM) if name == "team" else (fleet.RUNNING, fleet.PLACED)
    return _asked(source, name, [parent for parent in parents if parent in borne])


def _values(name: str, parents: Sequence[str], from_log: bool) -> str:
    source = sidecar.REQUESTS.name if from_log or name == "team" else vllm.NUM_REQUESTS_RUNNING.name
    # The request log knows no scrape job and no engine's address, and is read in a namespace of its own.
    return _asked(
        source,
        name,
        [parent for parent in parents if not (name == "team" and parent in ("namespace", "job", "instance"))],
    )


def _asked(source: str, name: str, parents: Sequence[str]) -> str:
    matchers = ", ".join(f'{parent}=~"${parent}"' for parent in parents)
    return f"label_values({source}{{{matchers}}}, {name})" if matchers else f"label_values({source}, {name})"

"""One row of a diagnosis, and the selectors of its condition."""

from __future__ import annotations

import re
from dataclasses import dataclass

from exporters.catalogue import promql
from exporters.catalogue.metric import Metric


@dataclass(frozen=True, slots=True)
class DiagnosisRow:
    """condition: PromQL that returns something exactly when this row holds. go_to: a mitigation of the page, or another
    page, as Markdown. finding: the row of the tuning matrix that answers the same question, if the doctor asks it."""

    what: str
    condition: str
    cause: str
    go_to: str
    finding: str = ""


def eq(label: str, value: str) -> str:
    """A matcher; of a regular expression where the value is one."""
    return f'{label}{"=~" if re.search(r"[|*+{]", value) else "="}"{value}"'


def no(label: str, value: str) -> str:
    """The opposite of `eq`."""
    return f'{label}{"!~" if re.search(r"[|*+{]", value) else "!="}"{value}"'


def filled(label: str) -> str:
    """A matcher with the value that this label has in the alert; see runbooks/page.py, `fill`."""
    return f'{label}=~"{{{{{label}}}}}"'


CLUSTER, INSTANCE, JOB, MODEL, PATH, TEAM, UPSTREAM, UUID, VARIANT = map(
    filled, ("cluster", "instance", "job", "model_name", "path", "team", "upstream", "uuid", "variant")
)
HERE = (INSTANCE, MODEL)
# By what a query adds up: the engine of an alert, each engine of its model, or one label.
ENGINE, EACH_OF_MODEL = ("instance", "model_name"), ("model_name", "instance")
BY_CLUSTER, BY_INSTANCE, BY_REASON, BY_TEAM = ("cluster",), ("instance",), ("reason",), ("team",)
DCGM_UUID = 'UUID=~"{{uuid}}"'  # the same GPU, as DCGM's exporter names the label


def at(metric: Metric, *where: str, part: str = "") -> str:
    """The selector of one series under its present name. part: of a histogram, such as _count; rows add those up over
    the engines of a model, so they hold each prefill/decode pair once."""
    where = tuple(promql.once_per_pair(metric, (), where)) if part else where
    return metric.name + part + (f"{{{', '.join(where)}}}" if where else "")

"""A scraped /metrics page as values. The text is trusted to no one: a page that does not parse names the line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


class BadPage(ValueError):
    """Text that is no exposition page."""


@dataclass(frozen=True, slots=True)
class Page:
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
        """Family names as the catalogue writes them: counters with _total, histograms without a suffix; `_created` left out."""
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


def parse(text: str) -> Page:
    """A page in the Prometheus text format (OpenMetrics text is near enough). Raises BadPage."""
    samples: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise BadPage(f"this is no Prometheus metrics page: {error}") from error
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)\s*$", text, re.MULTILINE))
    if not samples:
        raise BadPage("this page holds no samples; is it the address of /metrics?")
    return Page(samples, kinds)

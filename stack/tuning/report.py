"""A bench as files to hand around: one HTML page that needs no network, Markdown for a pull request, CSV and JSON.

Invariant: every format says the same, because all are made from the same sections (report_sections.py); foreign text is
escaped by the templates."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from exporters.requests.record import BadLine
from exporters.text import write_atomically
from stack import templates
from stack.bench import result
from stack.bench.workload import NO_SLO, Slo
from stack.board import pages
from stack.tuning import charts
from stack.tuning.derived import Material
from stack.tuning.lab_rows import LabRow
from stack.tuning.report_blocks import Pictures, ReportSection
from stack.tuning.report_data import as_csv, as_json
from stack.tuning.report_sections import sections, summary

COMMENT_CHARACTERS = 60_000  # a comment on a pull request may have 65,536


def page(material: Material, lab: Sequence[LabRow] = ()) -> str:
    """Return one HTML file with its scripts and figures inside, which may load nothing."""
    bench = material.bench
    scripts = [pages.static("plotly.min.js").decode(), _static("report.js")]
    return page_of(bench.title or bench.id, summary(bench), sections(material, lab), charts.drawn(material), scripts)


def page_of(
    title: str, lines: Sequence[str], shown: Sequence[ReportSection], data: object = None, scripts: Sequence[str] = ()
) -> str:
    """Return one HTML file of sections. lines: below the title. data: what the scripts find in the element `data`."""
    body = templates.html("stack.tuning").get_template("report.html")
    style = pages.static(pages.STYLE).decode() + _static("report.css")
    return pages.standing_alone(title, style, scripts, data, body.render(title=title, summary=lines, sections=shown))


def _static(name: str) -> str:
    return importlib.resources.files("stack.tuning").joinpath("static", name).read_text(encoding="utf-8")


def markdown(material: Material, lab: Sequence[LabRow] = ()) -> str:
    """Return the report as Markdown that fits a comment on a pull request: long parts are folded, and sections beyond
    the limit are left out by name."""
    bench = material.bench
    macros: Any = templates.markdown("stack.tuning").get_template("report.md").module
    text, left_out = macros.head(bench.title or bench.id, summary(bench)), []
    for section in sections(material, lab):
        if all(isinstance(block, Pictures) for block in section.blocks):
            continue
        part = macros.section(section)
        if len(text) + len(part) > COMMENT_CHARACTERS:
            left_out.append(section.title)
        else:
            text += part
    return str(text + macros.left_out(left_out) if left_out else text)


def gather(folder: Path, slo: Slo = NO_SLO, **given: Any) -> Material:
    """The material of a bench folder. slo: limits to apply instead of the bench's own. given: the rest of Material.
    Raises BadBench."""
    bench = result.read(folder)
    if slo != NO_SLO:
        bench = msgspec.structs.replace(bench, slo=slo.limits)
    place = folder if folder.is_dir() else folder.parent
    try:
        records = list(result.requests(place))
    except FileNotFoundError:
        records = []
    except (OSError, BadLine) as error:
        raise result.BadBench(f"{place / result.REQUESTS} cannot be read: {error}") from error
    return Material(bench=bench, records=records, **given)


def write(material: Material, out: Path, lab: Sequence[LabRow] = ()) -> list[Path]:
    """Writes the page to `out`, and beside it .md, .csv and .json of the same name; each whole or not at all. Raises
    OSError."""
    forms = {
        ".html": page(material, lab),
        ".md": markdown(material, lab),
        ".csv": as_csv(material.bench),
        ".json": as_json(material, lab),
    }
    stem = out.name.removesuffix(".html")
    paths = [out.with_name(stem + suffix) for suffix in forms]
    for path, text in zip(paths, forms.values(), strict=True):
        write_atomically(path, text)
    return paths

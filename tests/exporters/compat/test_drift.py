"""`metrics drift`: a vLLM against the catalogue, in both directions, and what it says to paste."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.catalogue import vllm
from exporters.catalogue.metric import Across, Kind, Metric, Provenance, Unit
from exporters.compat import drift, source_scan
from stack import cli, render

GOLDEN = Path(__file__).parents[2] / "golden"
PAGES = sorted(GOLDEN.glob("*.prom"))
FOUND = {path.stem: drift.from_scrape(path.read_text(), path.name.split("-")[0]) for path in PAGES}
ENGINE_OWN = {
    stem: [m for m in drift.CATALOGUE if m.name in found.families and m.name.startswith("vllm:")]
    for stem, found in FOUND.items()
}
each_page = pytest.mark.parametrize("stem", FOUND)
any_family = st.sampled_from([(stem, metric) for stem, metrics in ENGINE_OWN.items() for metric in metrics])


def told(
    found: drift.ObservedVllm, catalogue: list[Metric] | tuple[Metric, ...], **more: object
) -> list[tuple[str, str]]:
    return [(change.what, change.name) for change in drift.drift(found, catalogue, **more)]


def instead(metric: Metric, *others: Metric) -> list[Metric]:
    """The catalogue with a family taken out and others put in."""
    return [*(one for one in drift.CATALOGUE if one != metric), *others]


@each_page
def test_captured_pages_do_not_drift(stem):
    """No captured page drifts whether or not its release is told."""
    assert [] == told(FOUND[stem], drift.CATALOGUE)
    assert [] == told(replace(FOUND[stem], release=None), drift.CATALOGUE)


@given(any_family)
@settings(max_examples=60)
def test_exactly_the_family_that_the_catalogue_lacks_is_new(chosen):
    stem, metric = chosen
    assert [("new", metric.name)] == told(FOUND[stem], instead(metric))


@given(any_family)
@settings(max_examples=60)
def test_a_pasted_entry_makes_the_drift_vanish(chosen):
    stem, metric = chosen
    (change,) = drift.drift(FOUND[stem], instead(metric))
    assert [] == told(FOUND[stem], instead(metric, pasted(change.paste)))


def pasted(text: str) -> Metric:
    names = {"Metric": Metric, "Kind": Kind, "Unit": Unit, "Across": Across, "Evidence": Provenance}
    exec(text, names)  # noqa: S102 what a person would paste into the catalogue
    return next(value for name, value in names.items() if isinstance(value, Metric))


@given(any_family)
@settings(max_examples=60)
def test_exactly_the_family_that_the_page_lacks_is_gone(chosen):
    stem, metric = chosen
    found = FOUND[stem]
    without = replace(found, families={name: family for name, family in found.families.items() if name != metric.name})
    expected = [("gone", metric.name)] if not metric.needs else []
    assert expected == told(without, drift.CATALOGUE)


@given(any_family)
@settings(max_examples=60)
def test_new_name_of_same_kind_is_a_rename(chosen):
    """A new name of the same kind and labels is told as a rename and its entry reaches back."""
    stem, metric = chosen
    if metric.needs:
        return
    found = FOUND[stem]
    newer = metric.name.removesuffix("_total") + "_v2" + "_total" * metric.name.endswith("_total")
    families = {newer if name == metric.name else name: family for name, family in found.families.items()}
    families[newer] = replace(families[newer], name=newer)
    (change,) = drift.drift(replace(found, families=families), drift.CATALOGUE)
    assert ("renamed", metric.name, newer) == (change.what, change.name, change.now)
    assert (metric.name, *metric.formerly) == pasted(change.paste).formerly


@given(any_family, st.sampled_from(["counter", "gauge", "histogram"]))
@settings(max_examples=60)
def test_exactly_the_changed_family_is_reported(chosen, kind):
    """Exactly the family of another kind or with another label is told."""
    stem, metric = chosen
    found = FOUND[stem]
    family = found.families[metric.name]
    changed = replace(found, families={**found.families, metric.name: replace(family, kind=kind)})
    assert ([("kind", metric.name)] if kind != family.kind else []) == told(changed, drift.CATALOGUE)
    more = replace(found, families={**found.families, metric.name: replace(family, labels=(*metric.labels, "zone"))})
    assert ([("labels", metric.name)] if metric.kind is not Kind.INFO else []) == told(more, drift.CATALOGUE)


def test_a_family_outside_its_releases_is_told():
    early = replace(next(m for m in drift.CATALOGUE if m.name == "vllm:num_requests_running"), since="0.40")
    changes = drift.drift(FOUND["0.32.0-before"], [*(m for m in drift.CATALOGUE if m.name != early.name), early])
    assert [("release", "vllm:num_requests_running", "0.40 .. ", "0.32.0")] == [
        (c.what, c.name, c.was, c.now) for c in changes
    ]


def test_bounds_and_help_are_told_by_two_pages():
    text = (GOLDEN / "0.32.0-before.prom").read_text()
    newer = re.sub(
        r'^(vllm:time_to_first_token_seconds_bucket\{.*le=")0\.02(".*)$', r"\g<1>0.03\2", text, flags=re.MULTILINE
    )
    newer = newer.replace("# HELP vllm:num_requests_running ", "# HELP vllm:num_requests_running As of now: ")
    changes = drift.drift(drift.from_scrape(newer), before=drift.from_scrape(text))
    assert [("help", "vllm:num_requests_running"), ("bounds", "vllm:time_to_first_token_seconds")] == [
        (c.what, c.name) for c in changes
    ]
    assert ("0.02", "0.03") == (changes[1].was, changes[1].now)


def test_the_panels_and_alerts_that_read_a_family_are_named():
    found = FOUND["0.32.0-before"]
    without = replace(found, families={n: f for n, f in found.families.items() if n != "vllm:num_preemptions_total"})
    uses = render.uses()
    (change,) = drift.drift(without, uses=uses)
    assert any(place.startswith("panel ") for place in change.places)
    assert any(place.startswith("alert ") for place in change.places)
    assert all("num_preemptions_total" in use.expr for use in uses if use.place in change.places)


def fake_rust_page() -> str:
    """Stands for the Rust frontend, of which no page could be captured: OpenMetrics, without what its source does not
    register."""
    lacking = [metric.name for metric in drift.CATALOGUE if vllm.NOT_RUST in metric.notes]
    lacking += ["vllm:admission_rejections", "vllm:request_num_preemptions", "python_", "process_"]
    stems = [name.removesuffix("_total") for name in lacking]
    lines = [
        line
        for line in (GOLDEN / "0.32.0-before.prom").read_text().splitlines()
        if not any(stem in line for stem in stems)
    ]
    bare = [re.sub(r"^(# (?:HELP|TYPE) \S+?)_total (?!histogram|Histogram)", r"\1 ", line) for line in lines]
    return "\n".join([*bare, "# EOF", ""])


def test_rust_frontend_gaps_are_not_called_gone(tmp_path):
    """What the rust frontend does not show is listed and not called gone."""
    page = tmp_path / "page"
    page.write_text(fake_rust_page())
    result = run(str(page), "--release", "0.32.0")
    assert 0 == result.exit_code, result.output
    unshown = drift.unshown(drift.from_scrape(fake_rust_page(), "0.32.0"))
    assert {"vllm:cache_config_info", "vllm:engine_sleep_state", "vllm:admission_rejections_total"} <= set(unshown)
    assert f"it lacks {len(unshown)}: {', '.join(unshown)}" in result.output
    assert list(unshown) == json.loads(run(str(page), "--release", "0.32.0", "--json").output)[0]["unshown"]


def test_page_of_another_frontend_reports_gone_families():
    """A page that is not of the rust frontend says of each family that it is gone."""
    text = fake_rust_page()
    assert ("gone", "vllm:cache_config_info") in told(
        drift.from_scrape(text.replace("# EOF", ""), "0.32.0"), drift.CATALOGUE
    )
    asked = (GOLDEN / "0.32.0-before.prom").read_text() + "# EOF\n"
    assert () == drift.unshown(drift.from_scrape(asked, "0.40.0"))


SOURCE = """
ATTENTION = "vllm::attention"
OLDER = "vllm:older_total"
class Names:
    READ = "vllm:tier_read_bytes"
def make(self, labelnames, registry):
    more = labelnames + ["tier"]
    self._gauge_cls(name="vllm:running", documentation="Now " "running.", labelnames=labelnames)
    table = {Names.READ: OffloadingCounterMetadata(documentation="Read.", labelnames=("tier",))}
    self._counter_cls(name=OLDER, documentation=table[0].documentation, labelnames=more)
    Histogram("vllm:took_seconds", "How long.", ["model_name"], buckets=(1, 2))
    stats.increase_counter(Names.READ, 3)
    for name, doc in [("vllm:bare", "x")]:
        self._counter_cls(name=name, documentation=doc, labelnames=labelnames)
    f"vllm:{registry}_total"
"""


def test_source_scan_reads_names_kinds_and_labels():
    """Names in constants, descriptions in tables, label lists added up; a name made at run time is named by its
    place."""
    read = source_scan.read([("a.py", SOURCE)])
    assert {
        "vllm:bare": ("", None),
        "vllm:older_total": ("counter", ("engine", "model_name", "tier")),
        "vllm:running": ("gauge", ("engine", "model_name")),
        "vllm:tier_read_bytes_total": ("counter", ("engine", "model_name", "tier")),
        "vllm:took_seconds": ("histogram", ("model_name",)),
    } == {name: (family.kind, family.labels) for name, family in read.families.items()}
    assert "Now running." == read.families["vllm:running"].help
    assert ("a.py:15",) == read.unread


def test_source_scan_resolves_labels_of_imported_constants():
    """vLLM 0.33 imports TIER_LABEL; the constant may have another name here, and the import may be relative."""
    using = """
from vllm.kv.base import TIER_LABEL as TIER, Names
from .base import RESULT
def make():
    return {Names.READ: OffloadingCounterMetadata(documentation="Read.", labelnames=(TIER, RESULT))}
"""
    defining = 'TIER_LABEL = "tier"\nRESULT = "result"\nclass Names:\n    READ = "vllm:tier_reads"\n'
    found = source_scan.read([("kv/spec.py", using), ("kv/base.py", defining)]).families["vllm:tier_reads_total"]
    assert ("engine", "model_name", "result", "tier") == found.labels
    unresolved = source_scan.read([("kv/spec.py", using), ("kv/base.py", defining.replace("RESULT", "OTHER"))])
    assert unresolved.families["vllm:tier_reads_total"].labels is None


def source_families(release: str) -> dict[str, source_scan.SourceFamily]:
    """Families of a release as its wheel's source names them."""
    read = json.loads((GOLDEN / f"{release}-source-families.json").read_text())
    return {
        name: source_scan.SourceFamily(name, found["kind"], found["labels"] and tuple(found["labels"]))
        for name, found in read.items()
    }


def test_0_33_has_twelve_families_more_than_0_32():
    before, now = source_families("0.32.0"), source_families("0.33.0")
    base = ("engine", "model_name")
    assert {
        "vllm:kv_offload_config_info": None,
        "vllm:kv_offload_tiering_promotion_latency_seconds": (*base, "result", "tier"),
        **{
            f"vllm:mooncake_{name}": base
            for name in (
                "bytes_transferred", "num_descriptors", "num_failed_recvs_total", "num_failed_transfers_total",
                "num_kv_expired_reqs_total", "xfer_time_seconds",
            )
        },
        **{f"vllm:umbp_transfer_{name}_total": (*base, "operation") for name in ("bytes", "completed", "failed",
                                                                                  "submitted")},
    } == {name: now[name].labels for name in now.keys() - before.keys()}  # fmt: skip
    assert before == {name: now[name] for name in before}


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_the_source_of_a_release_does_not_drift(release):
    found = drift.ObservedVllm(source_families(release), release, complete=True)
    assert () == drift.drift(found)


@pytest.mark.engine
def test_the_installed_engine_does_not_drift_and_needs_no_start(part):
    """Every family that the source of the engine names, with its kind and labels; nothing is imported or started."""
    python = part("engine").path.parent / "python"
    result = CliRunner().invoke(cli.main, ["metrics", "drift", "--installed", str(python), "--json"])
    (report,) = json.loads(result.output)
    assert ([], 0) == (report["changes"], result.exit_code)
    assert part("engine").version == report["release"]
    assert report["families"] > 100


def test_every_reason_to_leave_a_family_out_is_needed():
    """A family that is listed after all needs no reason, but for those that the reason itself names as listed."""
    listed = {
        beginning: [m.name for m in drift.CATALOGUE if m.name.startswith(beginning)] for beginning in drift.LEFT_OUT
    }
    assert {"vllm:kv_offload_tiering_"} == {beginning for beginning, names in listed.items() if names}


def run(*arguments: str):
    return CliRunner().invoke(cli.main, ["metrics", "drift", *arguments])


def test_exit_codes_of_drift(tmp_path):
    """The command exits 0 without drift 1 with it and 2 where nothing can be read."""
    page = tmp_path / "page"
    page.write_text(
        (GOLDEN / "0.32.0-before.prom").read_text()
        + "# HELP vllm:brand_new What it is\n# TYPE vllm:brand_new gauge\nvllm:brand_new 1\n"
    )
    assert 0 == run(str(GOLDEN / "0.32.0-before.prom"), "--release", "0.32.0").exit_code
    result = run(str(page), "--release", "0.33.0")
    assert 1 == result.exit_code
    entry = (
        "BRAND_NEW = Metric(",
        '"vllm:brand_new",',
        "Kind.GAUGE,",
        "Unit.COUNT,",
        '"What it is.",',
        "labels=(),",
        'since="0.33",',
    )
    assert "\n    ".join(entry) in result.output
    assert 2 == run().exit_code


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("/nowhere",), "No such file"),
        (("--installed", "/nowhere/python"), "No such file"),
        (("--installed", "/etc"), "holds no vllm/v1"),
        ((__file__,), f"{__file__}: not a Prometheus"),
        ((str(GOLDEN / "0.32.0-before.prom"), "--before", __file__), f"{__file__}: not a Prometheus"),
        ((str(GOLDEN / "0.32.0-before.prom"), "--before", "/dev/null"), "/dev/null: no samples found"),
        (("http://127.0.0.1:1", "--http-config", "/nowhere"), "/nowhere"),
        (("http://127.0.0.1:1",), "does not answer"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_cause(arguments, cause):
    result = run(*arguments)
    assert 2 == result.exit_code
    assert cause in result.output
    assert "Traceback" not in result.output


def test_a_page_of_somebody_else_is_refused(tmp_path):
    page = tmp_path / "page"
    page.write_text("# TYPE node_load1 gauge\nnode_load1 1\n")
    result = run(str(page))
    assert 2 == result.exit_code
    assert re.search(f"{page} .*`vllm-watch metrics check`", result.output)

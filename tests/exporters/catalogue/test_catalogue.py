"""The catalogue of vLLM's families against pages captured from running engines."""

import re
from pathlib import Path

import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from exporters.catalogue import vllm
from exporters.catalogue.metric import Across, Kind, Metric, Provenance, Unit, key

GOLDEN = Path(__file__).parents[2] / "golden"
PAGES = sorted(GOLDEN.glob("*.prom"))
EVERY = (*vllm.VLLM, *vllm.BESIDE, *vllm.RETIRED)
BY_NAME = {metric.name: metric for metric in EVERY}
TYPE = {kind: "gauge" if kind is Kind.INFO else kind.value for kind in Kind}


def release(page: Path) -> str:
    return page.name.split("-")[0]


def families(page: Path) -> dict[str, Family]:
    """The families of a page by the name a scrape shows: the parser strips _total from counters, and makes gauges of
    _created twins."""
    parsed = list(text_string_to_metric_families(page.read_text()))
    shown = {family.name + "_total" * (family.type == "counter"): family for family in parsed}
    twins = {f"{family.name}_created" for family in parsed if family.type in ("counter", "histogram", "summary")}
    return {name: family for name, family in shown.items() if name not in twins}


def labels(family: Family) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le", "quantile"}


def value(page: Path, sample_name: str) -> float:
    return sum(s.value for family in families(page).values() for s in family.samples if s.name == sample_name)


def each(metrics: tuple[Metric, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("metric", metrics, ids=lambda metric: metric.name)


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def test_pages_of_three_releases_are_kept():
    """Without pages every comparison below would pass."""
    assert {"0.10.2", "0.20.2", "0.32.0"} == {release(page) for page in PAGES}


@each_page
def test_every_family_on_a_page_is_in_the_catalogue(page: Path):
    """A family that we do not know is one that nobody can ask about."""
    assert set() == set(families(page)) - set(BY_NAME)


@each_page
def test_a_family_is_of_the_kind_that_the_page_declares(page: Path):
    """rate() of a gauge or a quantile of a summary is an empty or wrong panel."""
    shown = families(page)
    assert {name: family.type for name, family in shown.items()} == {name: TYPE[BY_NAME[name].kind] for name in shown}


@each_page
def test_a_family_carries_the_labels_that_the_page_shows(page: Path):
    """Grouping by a label that is not there merges what should stay apart. Families without samples show no labels."""
    shown = {
        name: labels(family)
        for name, family in families(page).items()
        if family.samples and name != vllm.CACHE_CONFIG_INFO.name
    }
    assert shown == {name: set(BY_NAME[name].labels) for name in shown}


@each_page
def test_cache_config_info_names_its_engine_and_no_model(page: Path):
    """Its labels are the fields of CacheConfig and change by release; only engine joins it to the other families."""
    found = labels(families(page)[vllm.CACHE_CONFIG_INFO.name])
    assert vllm.CACHE_CONFIG_INFO.labels == ("engine",)
    assert {
        "engine",
        "block_size",
        "num_gpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
        "gpu_memory_utilization",
    } <= found
    assert "model_name" not in found


@each_page
def test_every_default_family_of_a_release_is_on_its_pages(page: Path):
    """since, until and needs are claims about real engines."""
    expected = {m.name for m in EVERY if m.lives_in(release(page)) and m.evidence is Provenance.SEEN and not m.needs}
    assert set() == expected - set(families(page))


@each_page
def test_no_page_shows_a_family_outside_its_releases(page: Path):
    """A family that is on the page although its since or until denies it would be asked for in vain, or not at all."""
    assert set() == {name for name in families(page) if not BY_NAME[name].lives_in(release(page))}


@each_page
def test_what_is_known_from_source_alone_is_on_no_page(page: Path):
    """Once a page shows it, the entry must say SEEN."""
    assert set() == {m.name for m in EVERY if m.evidence is Provenance.SOURCE} & set(families(page))


@each_page
def test_sample_names_are_announced_by_the_catalogue(page: Path):
    """Counters with _total, histograms and summaries by their parts."""
    known = {sample for metric in EVERY for sample in metric.samples}
    assert (
        set()
        == {s.name for family in families(page).values() for s in family.samples if not s.name.endswith("_created")}
        - known
    )


def test_no_two_metrics_share_a_name():
    """One name, one meaning."""
    assert len(EVERY) == len(BY_NAME)


def test_former_names_are_retired_families():
    """A question that reaches back to the old name must get the same quantity in the same unit."""
    former = [(metric, old) for metric in vllm.VLLM for old in metric.formerly]
    assert len(former) == 4
    for metric, old in former:
        before = {retired.name: retired for retired in vllm.RETIRED}[old]
        assert (before.kind, before.unit, before.labels, before.across) == (
            metric.kind,
            metric.unit,
            metric.labels,
            metric.across,
        )


@each(EVERY)
def test_a_family_says_what_it_means_and_how_to_read_it(metric: Metric):
    """One sentence for the operator, and nothing left blank."""
    assert re.fullmatch(r"[A-Z].+\.", metric.meaning)
    assert metric.notes
    assert all(note == note.strip() and note.endswith(".") for note in metric.notes)
    assert metric.labels == tuple(sorted(set(metric.labels)))


@each(vllm.VLLM)
def test_every_living_vllm_family_has_a_first_release(metric: Metric):
    """The board needs it to say why a panel is empty on an older engine."""
    assert metric.since is not None
    assert metric.until is None


@each(vllm.RETIRED)
def test_every_retired_family_has_a_life_that_ended(metric: Metric):
    """A retired name is kept to explain dead queries, so its end must be known."""
    assert key(metric.since or "0") < key(metric.until or "0")


@each(EVERY)
def test_shares_are_never_added_up_over_engines(metric: Metric):
    """Two engines at 40 % are not one at 80 %."""
    assert not (metric.unit is Unit.RATIO and metric.across is Across.SUM)


@pytest.mark.parametrize(("wrong", "instead"), vllm.NEVER_EXISTED.items(), ids=vllm.NEVER_EXISTED)
def test_a_name_that_never_existed_leads_to_one_that_does(wrong: str, instead: str):
    """The advice must not repeat the mistake."""
    assert wrong not in {sample for metric in EVERY for sample in (metric.name, *metric.samples)}
    assert set(re.findall(r"(?:vllm:|http_)\w+", instead)) <= {metric.name for metric in (*vllm.VLLM, *vllm.BESIDE)}


@pytest.mark.parametrize("page", [p for p in PAGES if release(p) != "0.10.2"], ids=lambda page: page.stem)
def test_prompt_tokens_by_source_add_up_to_prompt_tokens(page: Path):
    """Cached tokens are within prompt_tokens_total, as its note says; adding them again would count them twice."""
    assert value(page, vllm.PROMPT_TOKENS.name) == value(page, vllm.PROMPT_TOKENS_BY_SOURCE.name)


def test_a_release_sees_the_old_name_the_new_name_or_both():
    """0.10.2 shows both names of the cache gauge, 0.20.2 the new one only."""
    assert vllm.GPU_CACHE_USAGE.lives_in("0.10.2")
    assert vllm.KV_CACHE_USAGE.lives_in("0.10.2")
    assert not vllm.GPU_CACHE_USAGE.lives_in("0.20.2")


def test_a_summary_is_scraped_as_a_count_and_a_sum():
    """No buckets, so no quantile can be asked of it."""
    assert vllm.HTTP_REQUEST_SIZE.samples == ("http_request_size_bytes_count", "http_request_size_bytes_sum")

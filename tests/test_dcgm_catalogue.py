"""dcgm-exporter's series beside our own: its units become base units, and a card that both show is shown once."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from dashboards import gpu as board
from dashboards.interpolate import ALL, Range, fill
from exporters.catalogue import dcgm, gpu
from exporters.catalogue.metric import Evidence, Kind, Metric, Unit

ANY = {"cluster": [ALL], "namespace": [ALL]}


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (dcgm.GPU_UTIL, "x * 0.01"),
        (dcgm.FB_USED, "x * 1048576"),
        (dcgm.SM_CLOCK, "x * 1000000"),
        (dcgm.ENERGY, "x * 0.001"),
        (dcgm.THERMAL_VIOLATION, "x * 1e-09"),
        (dcgm.POWER_USAGE, "x"),
        (dcgm.ENGINE_ACTIVE, "x"),
    ],
    ids=lambda value: value.metric.name if isinstance(value, dcgm.Field) else "",
)
def test_a_figure_of_dcgm_comes_in_base_units(field, expected):
    assert expected == field.base("x")


def test_the_unit_that_dcgm_counts_in_is_told_where_it_is_not_the_base_unit():
    told = {field.metric.name for field in dcgm.FIELDS if any(note.startswith("Counts in ") for note in field.metric.notes)}
    assert {field.metric.name for field in dcgm.FIELDS if field.raw is not dcgm.Raw.BASE} == told


def test_what_was_never_run_says_so():
    assert {Evidence.SOURCE} == {metric.evidence for metric in dcgm.DCGM}


def test_only_dcgm_may_count_without_total():
    """dcgm-exporter names a family after its field; everyone else who forgets _total has made a mistake."""
    assert Kind.COUNTER is dcgm.ENERGY.metric.kind
    with pytest.raises(ValueError, match="_total"):
        Metric("vllm_watch_energy_joules", Kind.COUNTER, Unit.JOULES, "Energy.")


def query(slug: str, at: int) -> str:
    panel = next(panel for panel in board.BOARD.panels if panel.slug == slug)
    return fill(panel.queries[at].expr, ANY, Range(0, 3600))


@pytest.mark.prometheus
def test_a_card_that_both_show_is_shown_once_and_a_divided_card_is_one_card(part, tmp_path):
    """GPU-a has a sidecar and dcgm-exporter; GPU-b only the latter, and two MIG instances, which repeat the power and split the memory."""
    one, two = 'UUID="GPU-b", GPU_I_ID="1"', 'UUID="GPU-b", GPU_I_ID="2"'
    rows = [(gpu.INFO, 'uuid="GPU-a"', 1), (gpu.POWER, 'uuid="GPU-a"', 650), (dcgm.POWER_USAGE.metric, 'UUID="GPU-a"', 651)]
    rows += [(dcgm.POWER_USAGE.metric, each, 500) for each in (one, two)]
    rows += [(dcgm.FB_USED.metric, each, 1024) for each in (one, two)]
    b = '{card="GPU-b", uuid="GPU-b", UUID="GPU-b"}'
    asked = [
        (query("power", 0), [('{card="GPU-a", uuid="GPU-a"}', 650)]),
        (query("power", 1), [(b, 500)]),
        (query("memory", 1), [("{}", 2 * 1024 * 1024**2)]),
    ]
    tests = {
        "interval": "1m",
        "input_series": [{"series": f"{metric.name}{{{labels}}}", "values": f"{value}x5"} for metric, labels, value in rows],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "5m", "exp_samples": [{"labels": labels, "value": value} for labels, value in samples]}
            for expr, samples in asked
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [tests]}))
    done = subprocess.run([part("promtool").path, "test", "rules", file], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr

"""dcgm-exporter's series beside our own: its units become base units, and a GPU that both show is shown once."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from dashboards.boards import gpu as board
from dashboards.interpolate import ALL, Range, fill
from exporters.catalogue import dcgm, gpu, vllm
from exporters.catalogue.metric import Kind, Metric, Provenance, Unit

ANY = {"cluster": [ALL]}


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


def test_dcgm_unit_is_named_unless_base_unit():
    """The unit that DCGM counts in is told where it is not the base unit."""
    told = {
        field.metric.name for field in dcgm.FIELDS if any(note.startswith("Counts in ") for note in field.metric.notes)
    }
    assert {field.metric.name for field in dcgm.FIELDS if field.raw is not dcgm.Raw.BASE} == told


def test_what_was_never_run_says_so():
    assert {Provenance.SOURCE} == {metric.evidence for metric in dcgm.DCGM}


def test_only_dcgm_may_count_without_total():
    """dcgm-exporter names a family after its field; everyone else who forgets _total has made a mistake."""
    assert Kind.COUNTER is dcgm.ENERGY.metric.kind
    with pytest.raises(ValueError, match="_total"):
        Metric("vllm_watch_energy_joules", Kind.COUNTER, Unit.JOULES, "Energy.")


def query(slug: str, at: int) -> str:
    panel = next(panel for panel in board.BOARD.panels if panel.slug == slug)
    return fill(panel.queries[at].expr, ANY, Range(0, 3600))


@pytest.mark.prometheus
def test_gpu_shown_twice_or_divided_counts_once(part, tmp_path):
    """GPU-a has a sidecar and dcgm-exporter; GPU-b only the latter, and two MIG instances, which repeat the power and
    split the memory."""
    one, two = 'UUID="GPU-b", GPU_I_ID="1"', 'UUID="GPU-b", GPU_I_ID="2"'
    rows = [
        (gpu.INFO, 'uuid="GPU-a"', 1),
        (gpu.POWER, 'uuid="GPU-a"', 650),
        (dcgm.POWER_USAGE.metric, 'UUID="GPU-a"', 651),
    ]
    rows += [(dcgm.POWER_USAGE.metric, each, 500) for each in (one, two)]
    rows += [(dcgm.FB_USED.metric, each, 1024) for each in (one, two)]
    b = '{gpu="GPU-b", uuid="GPU-b", UUID="GPU-b"}'
    asked = [
        (query("power", 0), [('{gpu="GPU-a", uuid="GPU-a"}', 650)]),
        (query("power", 1), [(b, 500)]),
        (query("memory", 1), [("{}", 2 * 1024 * 1024**2)]),
    ]
    answered(part, tmp_path, [(f"{metric.name}{{{labels}}}", f"{value}x30") for metric, labels, value in rows], asked)


def answered(part, folder, series, asked):
    """On the real promtool: a sample every 15 seconds, asked after five minutes."""
    tests = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": "5m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for expr, samples in asked
        ],
    }
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [tests]}))
    done = subprocess.run([part("promtool").path, "test", "rules", file], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.prometheus
def test_two_sidecars_that_see_one_card_do_not_make_two(part, tmp_path):
    """They may number it differently: one of them may run in a container that sees only this GPU. Either name will do,
    but only one."""
    called = 'driver_version="570", index="{}", mig="off", name="H100", uuid="GPU-a"'
    series = []
    for at, index in (("one:9401", 3), ("two:9401", 0)):
        series += [
            (f'{gpu.INFO.name}{{instance="{at}", {called.format(index)}}}', "1x30"),
            (f'{gpu.ENERGY.name}{{instance="{at}", uuid="GPU-a", method="counter"}}', "0+7500x30"),
            (f'{gpu.THROTTLE.name}{{instance="{at}", uuid="GPU-a", reason="hw_thermal_slowdown"}}', "0+3x30"),
            (f'{gpu.ECC_ERRORS.name}{{instance="{at}", uuid="GPU-a", kind="corrected"}}', "0+1x30"),
            (f'{gpu.ABSENT.name}{{instance="{at}", uuid="GPU-a", reason="not_supported"}}', "2x30"),
            (f'{gpu.POWER.name}{{instance="{at}", uuid="GPU-a"}}', "500x30"),
        ]
    asked = [
        (f"round({query('energy', 0)}, 0.001)", [('{gpu="GPU-a", uuid="GPU-a"}', 500)]),
        (f"round({query('held-down', 0)}, 0.001)", [("{}", 0.2)]),
        (query("absent", 0), [('{reason="not_supported"}', 2)]),
        (f"count({query('card-table', 1)})", [("{}", 1)]),
        (f"count({query('card-table', 3)})", [("{}", 1)]),
        (query("tokens-per-joule", 0), []),
    ]
    answered(part, tmp_path, series, asked)


@pytest.mark.prometheus
def test_every_gpu_pays_for_tokens_of_a_cluster(part, tmp_path):
    """GPU-a has a sidecar and dcgm-exporter, GPU-b only the latter; engines and exporters run in different
    namespaces."""
    series = [
        (f'{vllm.GENERATION_TOKENS.name}{{cluster="c", namespace="serving", model_name="m"}}', "0+18000x30"),
        (f'{gpu.INFO.name}{{cluster="c", namespace="gpus", uuid="GPU-a"}}', "1x30"),
        (f'{gpu.POWER.name}{{cluster="c", namespace="gpus", uuid="GPU-a"}}', "400x30"),
        (f'{dcgm.POWER_USAGE.metric.name}{{cluster="c", namespace="gpus", UUID="GPU-a"}}', "401x30"),
        (f'{dcgm.POWER_USAGE.metric.name}{{cluster="c", namespace="gpus", UUID="GPU-b"}}', "200x30"),
    ]
    answered(part, tmp_path, series, [(f"round({query('tokens-per-joule', 0)}, 0.001)", [('{cluster="c"}', 2)])])

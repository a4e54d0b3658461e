"""Loads of a bench: in which order they are, which are within an SLO, and which is the last one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stack.bench.load_curve import LoadPoint, curves
from stack.bench.result import Bench, BenchEngine, BenchVariant, Run
from stack.bench.workload import Slo, slo_of

SLO = {"ttft_ms": 500.0, "tpot_ms": 50.0}
WELL = {"ttft_ms.p95": 100.0, "tpot_ms.p95": 10.0, "error_ratio": 0.0, "qps": 1.0, "tokens_per_second": 10.0}


def run(number: int, point: str, variant: str = "a", cut: str | None = None, **figures: float) -> Run:
    """ttft_ms, tpot_ms and e2e_ms are p95s."""
    named = {f"{name}.p95" if name.endswith("_ms") else name: value for name, value in figures.items()}
    return Run(
        number=number, variant=variant, workload="short", point=point, started_s=number, ended_s=number + 1, seed=0,
        asked=9, ok=9, figures=WELL | named, cut=cut,
    )  # fmt: skip


def bench(*runs: Run, variants: tuple[str, ...] = ("a",), slo: Mapping[str, float] = SLO) -> Bench:
    return Bench(
        id="b", title="t", tool="t", started_s=0, ended_s=9, runs=runs, workloads=(), workload_hash="h", slo=slo,
        variants=tuple(BenchVariant(name=name, engine=BenchEngine(url="", model="m")) for name in variants),
    )  # fmt: skip


def last(*runs: Run, slo: Mapping[str, float] = SLO) -> str | None:
    (curve,) = curves(bench(*runs))
    point = curve.last_within(slo)
    return point and point.label


def point(**p95_ms: float) -> LoadPoint:
    return LoadPoint(1.0, "c1", 1.0, 1.0, p95_ms, 0.0)


def test_loads_are_in_order_of_their_number():
    (curve,) = curves(bench(run(1, "c16"), run(2, "c2"), run(3, "c1")))
    assert ["c1", "c2", "c16"] == [each.label for each in curve.points]


def test_the_last_load_is_the_one_before_the_first_beyond():
    assert "c2" == last(run(1, "c1"), run(2, "c2"), run(3, "c4", ttft_ms=501.0), run(4, "c8", ttft_ms=900.0))
    assert "c2" == last(run(1, "c1"), run(2, "c2"), run(3, "c4", tpot_ms=51.0), run(4, "c8")), "one limit is enough"
    assert last(run(1, "c1", ttft_ms=501.0), run(2, "c2")) is None


def test_all_within_is_the_highest_load():
    assert "c8" == last(run(1, "c1"), run(2, "c8"))


def test_a_limit_that_is_reached_is_kept():
    assert "within" == point(ttft_ms=500.0, tpot_ms=50.0).verdict(SLO)
    assert "beyond" == point(ttft_ms=500.1, tpot_ms=50.0).verdict(SLO)


def test_what_was_not_measured_is_never_within():
    assert "not measured" == point(ttft_ms=1.0).verdict(SLO)
    assert "beyond" == point(ttft_ms=501.0).verdict(SLO), "one limit that is exceeded is known"
    assert "not measured" == point(ttft_ms=1.0).verdict({}), "without an SLO"


def test_failed_requests_met_no_limit():
    assert "c1" == last(run(1, "c1", error_ratio=0.05), run(2, "c2", error_ratio=0.06))


def test_a_load_is_the_median_of_its_runs_and_a_cut_run_is_none():
    runs = [run(n, "c1", ttft_ms=ms) for n, ms in enumerate((100.0, 200.0, 900.0))]
    (curve,) = curves(bench(*runs, run(4, "c1", ttft_ms=9000.0, cut="stopped")))
    assert 200.0 == curve.points[0].p95_ms["ttft_ms"]


def test_kinds_of_load_and_variants_are_curves_of_their_own():
    found = curves(
        bench(run(1, "c1"), run(2, "r2"), run(3, "r2-c8"), run(4, "c1", "b"), run(5, "unknown"), variants=("a", "b"))
    )
    assert [("a", "c1"), ("a", "r2"), ("a", "r2-c8"), ("b", "c1")] == [
        (curve.variant, point.label) for curve in found for point in curve.points
    ]
    kinds = [curve.kind for curve in found]
    assert ["at once", "per second"] == kinds[:2]
    assert (kinds[0], f"{kinds[1]}, at most 8 {kinds[0]}") == (kinds[3], kinds[2])


def test_throughput_is_in_tokens_only_where_every_load_has_them():
    without = run(1, "c1")
    without = Run(**{name: getattr(without, name) for name in without.__struct_fields__} | {"figures": {
        name: value for name, value in without.figures.items() if name != "tokens_per_second"}})  # fmt: skip
    assert "answers/s" == curves(bench(without, run(2, "c2")))[0].unit
    assert "output tokens/s" == curves(bench(run(1, "c1"), run(2, "c2")))[0].unit


def test_limits_are_read_from_options():
    assert Slo(ttft_ms=500.0, e2e_ms=2000.0) == slo_of(["ttft_ms=500", "e2e_ms=2e3"])
    assert {"ttft_ms": 500.0} == slo_of(["ttft_ms=500"]).limits


@pytest.mark.parametrize("text", ["ttft=500", "ttft_ms", "ttft_ms=", "ttft_ms=x", "ttft_ms=-1", "ttft_ms=inf", "=5"])
def test_another_limit_is_refused_in_one_sentence(text: str):
    with pytest.raises(ValueError, match=rf"^'{text}' .*\bttft_ms, tpot_ms, e2e_ms\b.*\bttft_ms=500$"):
        slo_of([text])

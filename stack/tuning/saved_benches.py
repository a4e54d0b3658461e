"""Comparison of benches that were saved: which runs of which variants stand against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stack.bench import result
from stack.tuning import experiment
from stack.tuning.comparison import BadComparison, Comparison
from stack.tuning.run_comparison import Setting, compare_runs

_NO_WORK = {
    "about",
    "scenario",
    "expected_hit",
    "runs",
    "order",
    "slo",
    "concurrency",
    "rate",
    "burst",
}  # of a workload, beside a load that both have


def compare_saved(
    folders: Sequence[Path], arms: tuple[str, str] | None, excluded: Sequence[int] = ()
) -> list[Comparison]:
    """Benches that were saved: two, or two arms of one, without the runs of these numbers. Raises BadBench and
    BadComparison."""
    if len(folders) > 2:
        raise BadComparison(f"{len(folders)} benches are given; compare two")
    folders = list({_place(folder): folder for folder in folders}.values())  # two names of one are its arms
    benches = [result.read(folder) for folder in folders]
    for folder, bench in zip(folders, benches, strict=True):
        if not bench.runs:
            raise BadComparison(f"{folder} has no runs{f': {bench.cut}' if bench.cut else ''}")
    one_bench = len(benches) == 1
    known = [arms_of([bench]) for bench in benches]
    if arms is None:
        arms = _only_arms(folders, known)
    both = (benches[0], benches[-1])
    sides = [_runs_of(bench, arm) for bench, arm in zip(both, arms, strict=True)]
    for folder, arm, runs, names in zip((folders[0], folders[-1]), arms, sides, (known[0], known[-1]), strict=True):
        if not runs:
            raise BadComparison(f"{folder} has no run of an arm {arm}; there are {', '.join(names)}")
    _refuse_unknown(excluded, sides, folders[0])
    loads = [load for load in dict.fromkeys(map(_load, sides[0])) if load in set(map(_load, sides[1]))]
    if not loads:
        raise BadComparison(f"{folders[0]} and {folders[-1]} have no workload and load in common")
    engines = [_engines_of(bench, arm) for bench, arm in zip(both, arms, strict=True)]
    labels = arms if one_bench else _labels(folders)
    found = []
    for load in loads:
        workload, _ = load
        repeated = any(experiment.repeats(bench, workload) for bench in benches)
        setting = Setting(one_bench=one_bench, shared_engine=engines[0] == engines[1], repeated=repeated)
        a, b = ([run for run in side if _load(run) == load] for side in sides)
        mine = {run.number for run in (*a, *b)} & set(excluded)
        comparison = compare_runs(a, b, setting=setting, names=labels, excluded=mine)
        caveats = (*_asked_otherwise(benches, workload), *comparison.caveats)
        found.append(replace(comparison, caveats=caveats))
    return found


def _only_arms(folders: Sequence[Path], known: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Return the arms to compare where none were named: both of one bench, or the first of each of two."""
    if len(known) == 2:
        return known[0][0], known[1][0]
    if len(known[0]) != 2:
        raise BadComparison(f"{folders[0]} has the arms {', '.join(known[0])}; say which two with --arms A B")
    return known[0][0], known[0][1]


def _runs_of(bench: result.Bench, arm: str) -> list[result.Run]:
    return [run for run in bench.runs if run.arm == arm]


def _load(run: result.Run) -> tuple[str, str]:
    return run.workload, run.point


def _engines_of(bench: result.Bench, arm: str) -> set[tuple[str, float | None]]:
    """Return the processes that served an arm: the address and start of each."""
    return {(each.engine.url, each.engine.started_s) for each in bench.arms if each.name == arm}


def _refuse_unknown(excluded: Sequence[int], sides: Sequence[Sequence[result.Run]], folder: Path) -> None:
    """Raise BadComparison for a run to exclude that no side has."""
    known = sorted({run.number for side in sides for run in side})
    if unknown := sorted(set(excluded) - set(known)):
        raise BadComparison(
            f"--exclude-run {unknown[0]}: {folder} has no such run of these arms; there are"
            f" {', '.join(map(str, known))}"
        )


def _place(folder: Path) -> Path:
    return (folder if folder.is_dir() else folder.parent).resolve()


def _labels(folders: Sequence[Path]) -> tuple[str, str]:
    """What two benches are called: their folders' names, or where those are the same, as much of their paths as tells
    them apart."""
    first, second = (_place(folder).parts for folder in folders)
    least = next(least for least in range(1, max(len(first), len(second)) + 1) if first[-least:] != second[-least:])
    return "/".join(first[-least:]), "/".join(second[-least:])


def _asked_otherwise(benches: Sequence[result.Bench], name: str) -> list[str]:
    """What two benches say differently of the workload that has this name in both."""
    first, second = (
        next((each for each in bench.workloads if each.get("name") == name), {}) for bench in (benches[0], benches[-1])
    )
    differ = sorted(key for key in {*first, *second} - _NO_WORK if first.get(key) != second.get(key))
    return (
        [f"the benches asked otherwise: workload {name} has another {', '.join(differ)}"]
        if differ and first and second
        else []
    )


def arms_of(benches: Sequence[result.Bench]) -> list[str]:
    """Their arms, in the order in which they come."""
    return list(dict.fromkeys(arm.name for bench in benches for arm in bench.arms))

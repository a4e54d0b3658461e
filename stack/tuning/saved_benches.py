"""Comparison of saved benches: choice of the runs and variants to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stack.bench import result
from stack.tuning import experiment
from stack.tuning.comparison import BadComparison, Comparison
from stack.tuning.run_comparison import Setting, compare_runs

# Keys of a workload that may differ between benches that share a load.
_NO_WORK = frozenset(["about", "scenario", "expected_hit", "runs", "order", "slo", "concurrency", "rate", "burst"])


def compare_saved(
    folders: Sequence[Path], variants: tuple[str, str] | None, excluded: Sequence[int] = ()
) -> list[Comparison]:
    """Compare two saved benches, or two variants of one, without the excluded runs. Raises BadBench and
    BadComparison."""
    if len(folders) > 2:
        raise BadComparison(f"{len(folders)} benches are given; compare two")
    folders = list({_place(folder): folder for folder in folders}.values())  # two names of one are its variants
    benches = [result.read(folder) for folder in folders]
    for folder, bench in zip(folders, benches, strict=True):
        if not bench.runs:
            raise BadComparison(f"{folder} has no runs{f': {bench.cut}' if bench.cut else ''}")
    one_bench = len(benches) == 1
    known = [variants_of([bench]) for bench in benches]
    if variants is None:
        variants = _only_variants(folders, known)
    both = (benches[0], benches[-1])
    sides = [_runs_of(bench, variant) for bench, variant in zip(both, variants, strict=True)]
    for folder, variant, runs, names in zip(
        (folders[0], folders[-1]), variants, sides, (known[0], known[-1]), strict=True
    ):
        if not runs:
            raise BadComparison(f"{folder} has no run of a variant {variant}; there are {', '.join(names)}")
    _refuse_unknown(excluded, sides, folders[0])
    loads = [load for load in dict.fromkeys(map(_load, sides[0])) if load in set(map(_load, sides[1]))]
    if not loads:
        raise BadComparison(f"{folders[0]} and {folders[-1]} have no workload and load in common")
    engines = [_engines_of(bench, variant) for bench, variant in zip(both, variants, strict=True)]
    labels = variants if one_bench else _labels(folders)
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


def _only_variants(folders: Sequence[Path], known: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Return the variants to compare where none were named: both of one bench, or the first of each of two."""
    if len(known) == 2:
        return known[0][0], known[1][0]
    if len(known[0]) != 2:
        raise BadComparison(f"{folders[0]} has the variants {', '.join(known[0])}; say which two with --variant A B")
    return known[0][0], known[0][1]


def _runs_of(bench: result.Bench, variant: str) -> list[result.Run]:
    return [run for run in bench.runs if run.variant == variant]


def _load(run: result.Run) -> tuple[str, str]:
    return run.workload, run.point


def _engines_of(bench: result.Bench, variant: str) -> set[tuple[str, float | None]]:
    """Return the processes that served a variant: the address and start of each."""
    return {(each.engine.url, each.engine.started_s) for each in bench.variants if each.name == variant}


def _refuse_unknown(excluded: Sequence[int], sides: Sequence[Sequence[result.Run]], folder: Path) -> None:
    """Raise BadComparison for a run to exclude that no side has."""
    known = sorted({run.number for side in sides for run in side})
    if unknown := sorted(set(excluded) - set(known)):
        raise BadComparison(
            f"--exclude-run {unknown[0]}: {folder} has no such run of these variants; there are"
            f" {', '.join(map(str, known))}"
        )


def _place(folder: Path) -> Path:
    return (folder if folder.is_dir() else folder.parent).resolve()


def _labels(folders: Sequence[Path]) -> tuple[str, str]:
    """Name two benches after their folders, or where those are the same, after as much of their paths as differs."""
    first, second = (_place(folder).parts for folder in folders)
    least = next(least for least in range(1, max(len(first), len(second)) + 1) if first[-least:] != second[-least:])
    return "/".join(first[-least:]), "/".join(second[-least:])


def _asked_otherwise(benches: Sequence[result.Bench], name: str) -> list[str]:
    """Return differences between two benches in the workload of this name."""
    first, second = (
        next((each for each in bench.workloads if each.get("name") == name), {}) for bench in (benches[0], benches[-1])
    )
    differ = sorted(key for key in {*first, *second} - _NO_WORK if first.get(key) != second.get(key))
    return (
        [f"the benches sent different requests: workload {name} has another {', '.join(differ)}"]
        if differ and first and second
        else []
    )


def variants_of(benches: Sequence[result.Bench]) -> list[str]:
    """Return the names of the variants, in order."""
    return list(dict.fromkeys(variant.name for bench in benches for variant in bench.variants))

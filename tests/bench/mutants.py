"""Mutation run: change one expression of a core module at a time, and see that its unit tests fail.

A mutant that no test kills shows a missing assertion, or is equivalent to the original: it computes the same. Those
are listed in EQUIVALENT with the reason. Modules and their tests are named below, so that a mutant costs seconds and
not the whole suite; general tools run every test they can find and know no seeds that pick the same mutants again.

    make mutants                        200 mutants
    make mutants ARGS="--count 20"      a small run
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("alerts", "dashboards", "exporters", "runbooks", "stack", "tests", "tools", "docs", "pyproject.toml")

# Module -> the tests that must notice a change of it; the quickest first.
MODULES: dict[str, tuple[str, ...]] = {
    "stack/gateway/admission.py": (
        "tests/stack/gateway/test_gateway_admission.py",
        "tests/stack/gateway/test_gateway_queue_share.py",
        "tests/stack/gateway/test_gateway_reload_fairness.py",
    ),
    "stack/gateway/request_body.py": ("tests/stack/gateway/test_gateway_ask.py",),
    "stack/gateway/sse.py": ("tests/stack/gateway/test_sse_scanner.py",),
    "exporters/requests/tail.py": (
        "tests/exporters/requests/test_tail.py",
        "tests/exporters/requests/test_archives.py",
    ),
    "exporters/requests/positions.py": (
        "tests/exporters/requests/test_tail.py",
        "tests/exporters/requests/test_archives.py",
    ),
    "exporters/requests/counters.py": (
        "tests/exporters/requests/test_ledger.py",
        "tests/exporters/test_native_histograms.py",
        "tests/exporters/test_sidecar_parts.py",
    ),
    "exporters/requests/store.py": ("tests/exporters/requests/test_ledger.py",),
    "exporters/requests/checkpoint.py": ("tests/exporters/requests/test_checkpoint.py",),
    "exporters/accounting/reconciliation.py": ("tests/exporters/accounting/test_reconcile.py",),
    "exporters/accounting/attribution.py": ("tests/exporters/accounting/test_attribution.py",),
    "exporters/statistics.py": ("tests/stack/tuning/test_statistics.py",),
    "stack/capacity/kv.py": ("tests/stack/capacity/test_capacity_kv.py",),
}

# Mutants that compute the same, as (module, original, mutated), and why.
EQUIVALENT: dict[tuple[str, str, str], str] = {}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change of one module. source: the whole module with the change."""

    module: str
    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.before, self.after

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before}  ->  {self.after}"


def changed(node: ast.AST, rng: random.Random) -> ast.AST | None:
    """Return the node with one change, or None where it has nothing to change."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Constant):
        return _other_constant(new)
    if isinstance(new, ast.Compare | ast.BinOp | ast.BoolOp):
        return _other_operator(new, rng)
    if isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    if isinstance(new, ast.Call) and isinstance(new.func, ast.Name) and new.func.id in _NAMES:
        new.func.id = _NAMES[new.func.id]
        return new
    if isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
        return new
    return _without_effect(new)


def _other_constant(node: ast.Constant) -> ast.AST | None:
    if isinstance(node.value, bool):
        return ast.Constant(not node.value)
    return ast.Constant(node.value + 1) if isinstance(node.value, int | float) else None


def _other_operator(node: ast.Compare | ast.BinOp | ast.BoolOp, rng: random.Random) -> ast.AST | None:
    if isinstance(node, ast.Compare):
        at = rng.randrange(len(node.ops))
        node.ops[at] = _COMPARISONS[type(node.ops[at])]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif type(node.op) in _OPERATORS and not isinstance(node.left, ast.JoinedStr):
        node.op = _OPERATORS[type(node.op)]()
    else:
        return None
    return node


def _without_effect(node: ast.AST) -> ast.AST | None:
    """Return what is left of a statement whose effect is taken away."""
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        node.value = ast.Constant(None)
        return node
    has_effect = isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    )
    return ast.Pass() if has_effect else None


def _inside_functions(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield parent, field and index of each node that runs: code of functions, without annotations and messages."""
    todo: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen: set[int] = set()
    skipped = {"annotation", "returns", "decorator_list", "args", "type_params"}
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for name, value in ast.iter_fields(node):
            if name in skipped or isinstance(node, ast.Raise | ast.JoinedStr):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.AST):
                    yield node, name, index
                    todo.append(child)


def mutants(module: str, rng: random.Random, count: int) -> list[Mutant]:
    """Return `count` mutants of a module, drawn by `rng`: each another place, as far as there are enough."""
    text = (ROOT / module).read_text()
    tree = ast.parse(text)
    places = list(_inside_functions(tree))
    rng.shuffle(places)
    found = []
    for parent, name, index in places:
        if len(found) == count:
            break
        holder = getattr(parent, name)
        node = holder if index is None else holder[index]
        new = changed(node, rng)
        if new is None or not hasattr(node, "lineno"):
            continue
        before, after = ast.unparse(node), ast.unparse(ast.fix_missing_locations(ast.copy_location(new, node)))
        _put(parent, name, index, new)
        source = ast.unparse(ast.fix_missing_locations(tree))
        _put(parent, name, index, node)
        found.append(Mutant(module, node.lineno, _short(before), _short(after), source))
    return found


def _put(parent: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _short(code: str) -> str:
    return " ".join(code.split())[:100]


def drawn(seed: int, count: int, modules: list[str]) -> list[Mutant]:
    """Return mutants spread over the modules; the same for the same seed."""
    rng = random.Random(seed)
    each = {module: count // len(modules) for module in modules}
    for module in rng.sample(modules, count % len(modules)):
        each[module] += 1
    return [mutant for module in modules for mutant in mutants(module, rng, each[module])]


def copied(to: Path) -> Path:
    """Return a copy of the tree in which modules can be changed; captures are linked."""
    to.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("golden", "situations", "__pycache__")
            shutil.copytree(ROOT / name, to / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, to / name)
    for name in ("golden", "situations"):
        (to / "tests" / name).symlink_to(ROOT / "tests" / name)
    return to


def run_tests(tree: Path, tests: tuple[str, ...], within_s: float | None) -> tuple[bool, float, str]:
    """Return whether all tests pass in the tree, the seconds it took, and the last lines. Too slow counts as failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "CI": "true", "PYTHONDONTWRITEBYTECODE": "1"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, timeout=within_s, capture_output=True, text=True, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return False, time.monotonic() - started, "took too long"
    return done.returncode == 0, time.monotonic() - started, done.stdout[-300:]


def run(chosen: list[Mutant], jobs: int) -> tuple[list[Mutant], list[Mutant]]:
    """Run the tests of each mutant. Return those killed and those that survived, without the equivalent ones.

    Raises RuntimeError where the tests of a module fail without any change."""
    chosen = [mutant for mutant in chosen if mutant.key not in EQUIVALENT]
    killed, survived = list[Mutant](), list[Mutant]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            trees.put(copied(Path(folder) / str(number)))
        within_s: dict[str, float] = {}
        clean = trees.get()
        for module in dict.fromkeys(mutant.module for mutant in chosen):
            passed, seconds, last = run_tests(clean, MODULES[module], None)
            if not passed:
                raise RuntimeError(f"{module}: its tests fail without a mutant: {last}")
            within_s[module] = 20 + 5 * seconds
        trees.put(clean)

        def passes(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                (tree / mutant.module).write_text(mutant.source)
                return run_tests(tree, MODULES[mutant.module], within_s[mutant.module])[0]
            finally:
                shutil.copy(ROOT / mutant.module, tree / mutant.module)
                trees.put(tree)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for mutant, alive in zip(chosen, pool.map(passes, chosen), strict=True):
                (survived if alive else killed).append(mutant)
                print(f"{'SURVIVED' if alive else 'killed  '}  {mutant}", flush=True)
    return killed, survived


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--module", action="append", choices=MODULES, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--least", type=float, default=0.9, help="share that must be killed")
    options = parser.parse_args()
    killed, survived = run(drawn(options.seed, options.count, options.module or list(MODULES)), options.jobs)
    share = len(killed) / max(1, len(killed) + len(survived))
    print(f"{len(killed)} of {len(killed) + len(survived)} mutants killed ({share:.0%}), seed {options.seed}")
    for mutant in survived:
        print(f"  survived: {mutant}")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())

"""Mutation run: change one point of a module, run the module's unit tests, list the changes that no test noticed.

    python tests/bench/mutants.py [--count 200 | --seconds 120] [--seed 1] [--module tail] [--jobs 2]

A mutant runs in a fork of this process, which has imported pytest and other libraries but nothing of the product; an
import hook gives the fork the changed module. Processes that a test starts run the unchanged module, so the tests
below are those that import what they test. Mutants are drawn by the hash of what they change: an edit of one line
leaves the draw of every other line as it was.

The modules are 20 of measuring, joining, admission, verdicts and capacity: 15 that are always checked, and of the rest
the five with the most mutants. Renderers, command lines, tables and what prints do not count.

A mutant is limited by the CPU time of its process, which a busy machine hardly changes. One that waits without end is
stopped after twice that time by the clock."""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.yaml"
GATEWAY = "tests/stack/gateway/test_"
REQUESTS = "tests/exporters/requests/test_"
ACCOUNTING = "tests/exporters/accounting/test_"
CAPACITY = "tests/stack/capacity/test_capacity_"
# Module -> its unit tests, the quickest first: the first failure ends a mutant.
TESTS: dict[str, tuple[str, ...]] = {
    "stack/gateway/admission.py": (f"{GATEWAY}gateway_admission.py",),
    "stack/gateway/queue_share.py": (f"{GATEWAY}gateway_queue_share.py",),
    "stack/gateway/request_body.py": (f"{GATEWAY}gateway_ask.py",),
    "stack/gateway/request_fields.py": (f"{GATEWAY}gateway_ask.py", f"{GATEWAY}gateway_bounds.py"),
    "stack/gateway/prompt_size.py": (f"{GATEWAY}gateway_ask.py", f"{GATEWAY}gateway_bounds.py"),
    "stack/gateway/sse.py": (f"{GATEWAY}sse_scanner.py",),
    "stack/capacity/kv.py": (f"{CAPACITY}memory.py", f"{CAPACITY}kv.py"),
    "exporters/statistics.py": ("tests/exporters/test_statistics.py",),
    "exporters/requests/tail.py": (f"{REQUESTS}tail.py", f"{REQUESTS}archives.py"),
    "exporters/requests/positions.py": (f"{REQUESTS}tail.py", f"{REQUESTS}archives.py"),
    "exporters/requests/counters.py": (
        f"{REQUESTS}counters.py",
        f"{REQUESTS}ledger.py",
        "tests/exporters/test_sidecar_parts.py",
    ),
    "exporters/requests/store.py": (f"{REQUESTS}ledger.py", f"{ACCOUNTING}accounts.py"),
    "exporters/requests/checkpoint.py": (f"{REQUESTS}checkpoint.py", f"{REQUESTS}ledger.py"),
    "exporters/accounting/reconciliation.py": (f"{ACCOUNTING}reconcile.py",),
    "exporters/accounting/attribution.py": (f"{ACCOUNTING}attribution.py",),
    "stack/gateway/client_connection.py": (f"{GATEWAY}gateway_server.py",),
    "stack/gateway/lease_store.py": (f"{GATEWAY}gateway_lease.py",),
    "stack/capacity/model.py": (f"{CAPACITY}model.py",),
    "stack/tuning/run_comparison.py": ("tests/stack/tuning/test_run_comparison.py",),
    "stack/tuning/live.py": ("tests/stack/tuning/test_live_compare.py",),
}
# Imported once, before the forks. Nothing of the product: what imports a mutated module must be imported in the fork.
LIBRARIES = (
    "pytest", "pytest_asyncio", "hypothesis.strategies", "aiohttp.web", "aiohttp.test_utils", "msgspec", "yaml",
    "click.testing", "prometheus_client", "promql_parser", "scipy.stats", "uvloop", "rich.console",
)  # fmt: skip
LIMIT_FACTOR, LIMIT_EXTRA_S = 4, 20
LIMIT_S = 60.0  # CPU time of a mutant in a run that has no time to run unchanged modules first; they take 10 s or less
WAITING_FACTOR = 2  # clock time that a mutant has, in limits of its CPU time

Span = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    module: str
    line_number: int
    line: str
    mutated: str  # the line with the change; a statement of several lines becomes one
    span: Span  # in characters of the source
    replacement: str

    def source(self) -> str:
        text = read_source(self.module)
        return text[: self.span[0]] + self.replacement + text[self.span[1] :]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.line, self.mutated


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    result: str  # killed, survived, timeout
    wall_s: float


def read_source(module: str) -> str:
    with tokenize.open(ROOT / module) as file:
        return file.read()


COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Return what a node may become: each change of one point."""
    if isinstance(node, ast.stmt):
        yield from statement_changes(node)
    elif isinstance(node, ast.Compare):
        yield from comparison_changes(node)
    else:
        yield from expression_changes(node)
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield node  # its condition, negated: see mutant_of()


def statement_changes(node: ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.AugAssign(op=operator):
            if type(operator) in ARITHMETIC:
                yield ast.AugAssign(node.target, ARITHMETIC[type(operator)](), node.value)
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def comparison_changes(node: ast.Compare) -> Iterator[ast.AST]:
    for place, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            yield ast.Compare(node.left, [*node.ops[:place], other(), *node.ops[place + 1 :]], node.comparators)


def expression_changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
            yield ast.BinOp(node.left, ARITHMETIC[type(operator)](), node.right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield ast.Call(ast.Name("max" if name == "min" else "min"), node.args, node.keywords)


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the code, less annotations, decorators and f-strings (their positions are wrong before Python 3.12)."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_strict = isinstance(child, ast.keyword) and child.arg == "strict"  # of zip: an assertion, no behaviour
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr) and not is_strict:
                yield from nodes(child)


def mutants_of(module: str) -> list[Mutant]:
    """Return every mutant of a module; a few do not compile."""
    text = read_source(module)
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def offset(row: int, column: int) -> int:
        return starts[row - 1] + len(lines[row - 1].encode()[:column].decode())

    def mutant_of(node: ast.AST, change: ast.AST) -> Mutant:
        place: Any = node
        if change is node:
            place = node.test  # type: ignore[attr-defined]
            change = ast.UnaryOp(ast.Not(), place)
        span = offset(place.lineno, place.col_offset), offset(place.end_lineno, place.end_col_offset)
        new = ast.unparse(ast.fix_missing_locations(change))
        new = f"({new})" if isinstance(change, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp) else new
        before, after = text[starts[place.lineno - 1] : span[0]], text[span[1] : starts[place.end_lineno]]
        return Mutant(module, place.lineno, lines[place.lineno - 1].strip(), (before + new + after).strip(), span, new)

    return [mutant_of(node, change) for node in nodes(ast.parse(text)) for change in changes(node)]


def compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.source(), mutant.module, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def draw(mutants: Sequence[Mutant], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants that compile, by the hash of what they change: one edit does not change the others."""
    times: dict[tuple[str, str, str], int] = {}
    ranked = []
    for mutant in mutants:
        nth = times[mutant.key] = times.get(mutant.key, 0) + 1
        rank = hashlib.sha256(repr((seed, nth, *mutant.key)).encode()).hexdigest()
        ranked.append((rank, mutant))
    ordered = (mutant for _, mutant in sorted(ranked, key=lambda pair: pair[0]))
    return list(islice(filter(compiles, ordered), count))


def equivalents() -> dict[tuple[str, str, str], str]:
    """Return the listed mutants that no test could notice, each with the reason."""
    import yaml

    rows = yaml.safe_load(EQUIVALENT.read_text()) or []
    return {(row["module"], row["line"], row["mutant"]): row["reason"] for row in rows}


class MutatedModule(importlib.machinery.SourceFileLoader):
    """Finder and loader of one module with a change."""

    def __init__(self, module: str, source: str):
        super().__init__(module.removesuffix(".py").replace("/", "."), str(ROOT / module))
        self.source = source

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec", dont_inherit=True)


def in_fork(module: str, source: str | None, folder: Path, limit_s: float | None) -> None:
    """Run the tests of a module in this fork, and end it with pytest's exit code."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))  # a mutant may allocate without end
    if limit_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s)))  # then SIGKILL
    if source is not None:
        sys.meta_path.insert(0, MutatedModule(module, source))
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={folder}/tmp"]
    os._exit(pytest.main([*options, *TESTS[module]]))


def start(module: str, source: str | None, folder: Path, limit_s: float | None = None) -> int:
    folder.mkdir()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            in_fork(module, source, folder, limit_s)
        finally:
            os._exit(70)
    return pid


def kill(pid: int) -> None:
    """End a fork and the processes of its tests. A fork that has only just started is no group yet."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def clean_runs(modules: Sequence[str], folder: Path, jobs: int) -> dict[str, float]:
    """Return the wall seconds of the tests of each module without a change, with `jobs` of them at a time."""
    waiting, running, took = list(modules), dict[int, tuple[str, float]](), dict[str, float]()
    while waiting or running:
        while waiting and len(running) < jobs:
            module = waiting.pop()
            pid = start(module, None, folder / module.replace("/", "-"))
            running[pid] = module, time.monotonic()
        pid, status = os.wait()
        module, began = running.pop(pid)
        took[module] = time.monotonic() - began
        if status:
            log = (folder / module.replace("/", "-") / "log").read_text()
            raise SystemExit(f"{module}: its tests fail without a change:\n{log}")
    return took


def run(
    mutants: Sequence[Mutant], folder: Path, jobs: int, limit_s: float | None, seconds: float | None = None
) -> Iterator[Outcome]:
    """Run the tests of each mutant, `jobs` at a time, each with a limit by the time without a change, or `limit_s`.

    limit_s: CPU time. seconds: for the whole run; what has not ended by then does not count."""
    ends = time.monotonic() + seconds if seconds else math.inf
    modules = sorted({mutant.module for mutant in mutants})
    took = {} if limit_s else clean_runs(modules, folder, jobs)
    limits = {module: limit_s or LIMIT_FACTOR * took[module] + LIMIT_EXTRA_S for module in modules}
    waiting, running = list(enumerate(mutants)), dict[int, tuple[int, Mutant, float]]()
    late: set[int] = set()
    try:
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < jobs:
                number, mutant = waiting.pop(0)
                pid = start(mutant.module, mutant.source(), folder / str(number), limits[mutant.module])
                running[pid] = number, mutant, time.monotonic()
            pid, status = os.waitpid(-1, os.WNOHANG)
            now = time.monotonic()
            for other, (_, mutant, began) in running.items():
                if other not in {pid, *late} and now - began > WAITING_FACTOR * limits[mutant.module]:
                    late.add(other)
                    kill(other)
            if pid == 0:
                time.sleep(0.02)
                continue
            number, mutant, began = running.pop(pid)
            shutil.rmtree(folder / str(number), ignore_errors=True)
            is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            yield Outcome(mutant, "timeout" if is_late else "killed" if status else "survived", now - began)
    finally:  # also when a signal ends this process: the forks are sessions of their own
        for pid in running:
            kill(pid)
            os.waitpid(pid, 0)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="change single points of a module and run its unit tests")
    parser.add_argument("--count", type=int, default=200, help="mutants to run")
    parser.add_argument("--seconds", type=float, help="run as many as end within this time, at most --count")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other mutants")
    parser.add_argument("--module", help="only modules whose path contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--at-least", type=float, default=0.9, help="share that must be killed")
    parser.add_argument(
        "--limit-s", type=float, help="CPU seconds for each mutant, without a first run of unchanged modules"
    )
    parser.add_argument("--verbose", action="store_true", help="also list what was killed")
    return parser.parse_args()


def main() -> int:
    wanted = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    for library in LIBRARIES:
        importlib.import_module(library)
    known = equivalents()
    modules = [module for module in TESTS if not wanted.module or wanted.module in module]
    possible = [mutant for module in modules for mutant in mutants_of(module)]
    stale = {key for key in known if key[0] in modules} - {mutant.key for mutant in possible}
    drawn = draw(possible, wanted.seed, wanted.count)
    listed = [mutant for mutant in drawn if mutant.key in known]
    counts = {"killed": 0, "survived": 0, "timeout": 0}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for outcome in run(
            [mutant for mutant in drawn if mutant.key not in known],
            Path(folder),
            wanted.jobs,
            wanted.limit_s or (LIMIT_S if wanted.seconds else None),
            wanted.seconds,
        ):
            counts[outcome.result] += 1
            if wanted.verbose or outcome.result == "survived":
                mutant = outcome.mutant
                print(f"{outcome.result}: {mutant.module}:{mutant.line_number} ({outcome.wall_s:.1f} s)")
                print(f"  - {mutant.line}\n  + {mutant.mutated}", flush=True)
    for module, line, _ in sorted(stale):
        print(f"{EQUIVALENT.name}: no such mutant any more: {module}: {line}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = sum(counts.values())
    share = (ran - counts["survived"]) / ran if ran else 1.0
    print(
        f"{ran} of {len(possible)} mutants, seed {wanted.seed}: {counts['killed']} killed, {counts['timeout']} timed "
        f"out, {counts['survived']} survived; {len(listed)} drawn that are equivalent; "
        f"{used.ru_utime + used.ru_stime:.0f} s CPU"
    )
    return int(share < wanted.at_least or bool(stale))


if __name__ == "__main__":
    sys.exit(main())

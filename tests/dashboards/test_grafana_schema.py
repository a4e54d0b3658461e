"""Boards against Grafana's own types of a dashboard: every release between the oldest and the newest that they are made
for.

The types say less than Grafana does in a few places. Each gap is closed in TYPES, as narrowly as it can be, beside its
reason."""

from __future__ import annotations

import copy
import json
import re
import subprocess

import pytest

from dashboards.grafana_json import to_json
from dashboards.registry import BOARDS
from stack.lab.install import npm

# panel type -> where its options are declared
OPTIONS = {"timeseries": "TimeSeries", "stat": "Stat", "table": "Table", "heatmap": "Heatmap", "text": "Text"}
CUSTOM = ("timeseries", "table", "heatmap")  # panel types with field options of their own

TYPES = """\
import type {
  AnnotationQuery, Dashboard, DashboardLink, DataQuery, FieldConfig, FieldConfigSource, Panel, RowPanel, VariableModel,
} from '@grafana/schema';
%(imports)s
// JSON holds the values of Grafana's enums, not the enums.
type Plain<T> = T extends string ? (string extends T ? T : `${T}`) : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
// A plugin fills in the options that are not given: those that came with a later release cannot be.
type Given<T> = T extends string ? (string extends T ? T : `${T}`) : T extends (infer U)[] ? Given<U>[]
  : T extends object ? { [K in keyof T]?: Given<T[K]> } : T;

type Board = Omit<Plain<Dashboard>, 'panels' | 'templating' | 'annotations'>;
type Row = Omit<Plain<RowPanel>, 'panels'> & { panels: [] };
// The link of a panel is declared as that of a dashboard, of which it shows three fields.
type Link = Given<DashboardLink> & { title: string; url: string };
// A field's own options may be anything there; here they are those that the panel declares.
type Field<C> = Omit<Plain<FieldConfig>, 'custom'> & { custom?: C };
type Fields<C> = Omit<Plain<FieldConfigSource>, 'defaults'> & { defaults: Field<C> };
// A query's own fields belong to the Prometheus plugin, which is no part of the schema after 10.
type Query = Omit<Plain<DataQuery>, 'datasource'> & { datasource: { type: 'prometheus'; uid: string }; expr: string; legendFormat: string;
  format: 'time_series' | 'table' | 'heatmap'; instant: boolean; range: boolean; editorMode: 'code'; exemplar?: boolean; interval?: string };
type OnBoard<T extends string, O, C> = Omit<Plain<Panel>, 'type' | 'options' | 'fieldConfig' | 'targets' | 'links'>
  & { type: T; options: Given<O>; fieldConfig: Fields<Given<C>>; targets?: Query[]; links?: Link[] };
// Grafana saves what it shows of a query variable's query, and does not declare it. A data source that nobody chose yet is {}.
type Variable = Plain<VariableModel> & { definition?: string };
type Source = Omit<Plain<VariableModel>, 'current'> & { type: 'datasource'; current?: Record<string, never> };
// The fields of a Prometheus annotation belong to the data source's plugin.
type Mark = Plain<AnnotationQuery> & { expr?: string; titleFormat?: string; textFormat?: string; tagKeys?: string; step?: string;
  useValueForTime?: boolean };
"""  # noqa: E501


def source(boards_json) -> str:
    """A TypeScript file that assigns each part of each board to its type, one named constant a line."""
    imports, panel_types = [], []
    for kind, name in OPTIONS.items():
        declared = f"dist/esm/raw/composable/{kind}/panelcfg/x/{name}PanelCfg_types.gen"
        # some releases do not export it by name
        imports.append(f"import type * as {name} from './node_modules/@grafana/schema/{declared}';")
        custom = f"{name}.FieldConfig" if kind in CUSTOM else "{}"
        panel_types.append(f"type {name}Panel = OnBoard<'{kind}', {name}.Options, {custom}>;")
    lines = [TYPES % {"imports": "\n".join(imports)}, *panel_types]
    for at, board in enumerate(boards_json):
        lines += [f"const b{at}_{name}: {of} = {json.dumps(value)};" for name, of, value in pieces(board)]
    return "\n".join(lines) + "\n"


def pieces(board):
    """(name, its TypeScript type, the JSON) of everything in a board; together they are all of it."""
    yield (
        "board",
        "Board",
        {key: value for key, value in board.items() if key not in ("panels", "templating", "annotations")},
    )
    yield "templating", "{ list: any[] }", {**board["templating"], "list": []}
    yield "annotations", "{ list: any[] }", {**board["annotations"], "list": []}
    for variable in board["templating"]["list"]:
        yield f"variable_{variable['name']}", "Source" if variable["type"] == "datasource" else "Variable", variable
    yield from ((f"annotation_{at}", "Mark", mark) for at, mark in enumerate(board["annotations"]["list"]))
    for top in board["panels"]:
        if top["type"] == "row":
            yield f"row_{top['id']}", "Row", {**top, "panels": []}
        for panel in top.get("panels", ()) if top["type"] == "row" else (top,):
            yield f"panel_{panel['id']}", f"{OPTIONS[panel['type']]}Panel", panel


def errors(boards_json, version, part, tmp_path):
    """What the compiler says, by the name of the constant; '' for what lies outside of them."""
    folder = part("grafana-schema").path
    text = source(boards_json)
    (tmp_path / "boards.ts").write_text(text)
    (tmp_path / "node_modules").symlink_to(npm.modules(folder, version))
    settings = {
        "strict": True,
        "noEmit": True,
        "skipLibCheck": True,
        "moduleResolution": "bundler",
        "module": "esnext",
        "target": "es2022",
        "lib": ["es2022"],
        "types": [],
        "noErrorTruncation": True,
    }
    (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": settings, "files": ["boards.ts"]}))
    command = [
        part("node").path,
        folder / "node_modules/typescript/lib/tsc.js",
        "--project",
        tmp_path,
        "--pretty",
        "false",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    said = re.findall(r"^boards\.ts\((\d+),\d+\): (.*)$", done.stdout, re.MULTILINE) or re.findall(
        r"boards\.ts\((\d+),\d+\): (.*)", done.stdout
    )
    assert (done.returncode == 0) == (not said), done.stdout + done.stderr
    rows = text.splitlines()
    names = [(re.match(r"const (\w+)", rows[int(row) - 1]), message) for row, message in said]
    return [(found[1] if found else "", message) for found, message in names]


@pytest.mark.parametrize("version", npm.SCHEMAS)
def test_boards_are_what_grafana_declares_a_dashboard_to_be(version, part, tmp_path):
    assert {} == {
        message: name
        for name, message in errors([json.loads(to_json(board)) for board in BOARDS], version, part, tmp_path)
    }, "each message with one of its places"


SMALL = {
    "title": "t", "uid": "u", "schemaVersion": 39, "tags": ["x"], "refresh": "30s", "graphTooltip": 1, "editable": True,
    "time": {"from": "now-1h", "to": "now"},
    "templating": {"list": [
        {"name": "job", "type": "query", "refresh": 2, "query": {"query": "q", "refId": "job"}, "definition": "q"}]},
    "annotations": {"list": [
        {"name": "a", "enable": True, "iconColor": "red", "datasource": {"type": "prometheus", "uid": "x"},
            "expr": "up"}]},
    "panels": [{
        "type": "timeseries", "title": "t", "id": 1, "gridPos": {"x": 0, "y": 0, "w": 8, "h": 7}, "targets": [],
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}},
        "fieldConfig": {"defaults": {"unit": "s",
            "custom": {"lineWidth": 1, "stacking": {"mode": "normal", "group": "A"}},
                                     "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}]}},
                                     "overrides": []},
    }, {"type": "stat", "title": "t", "id": 2, "options": {"colorMode": "value"},
    "fieldConfig": {"defaults": {}, "overrides": []}}],
}  # fmt: skip

# Where in SMALL, and a value that Grafana does not take there. None of them may pass.
WRONG = [
    (("refresh",), 30),
    (("graphTooltip",), 7),
    (("sharedCrosshair",), True),
    (("time",), {"from": "now-1h"}),
    (("tags",), "x"),
    (("schemaVersion",), "39"),
    (("templating", "list", 0, "type"), "qeury"),
    (("templating", "list", 0, "refresh"), 9),
    (("templating", "list", 0, "useTags"), False),
    (("annotations", "list", 0, "enable"), "yes"),
    (("annotations", "list", 0, "colour"), "red"),
    (("panels", 0, "id"), "1"),
    (("panels", 0, "span"), 4),
    (("panels", 0, "gridPos", "w"), "8"),
    (("panels", 0, "options", "legend", "displayMode"), "lsit"),
    (("panels", 0, "options", "tooltips"), {}),
    (("panels", 0, "targets"), [{"refId": "A", "expr": "up"}]),
    (("panels", 0, "links"), [{"title": "no address"}]),
    (("panels", 0, "fieldConfig", "defaults", "custom", "lineWidth"), "1"),
    (("panels", 0, "fieldConfig", "defaults", "custom", "stacking", "mode"), "stacked"),
    (("panels", 0, "fieldConfig", "defaults", "custom", "linewidth"), 1),
    (("panels", 0, "fieldConfig", "defaults", "thresholds", "steps"), [{"value": 1}]),
    (("panels", 1, "options", "colorMode"), "valeu"),
    (("panels", 1, "options", "legend"), {}),
]


def with_value(where, value):
    board = copy.deepcopy(SMALL)
    inside = board
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    return board


@pytest.mark.parametrize("version", [npm.SCHEMAS[0], npm.SCHEMAS[-1]])
def test_a_board_with_a_wrong_value_anywhere_does_not_pass(version, part, tmp_path):
    """The first board is right and has no error; each of the others has its own."""
    told = errors([SMALL, *(with_value(where, value) for where, value in WRONG)], version, part, tmp_path)
    numbers = {int(re.match(r"b(\d+)_", name)[1]) for name, _ in told}
    passed = [where for at, (where, _) in enumerate(WRONG, 1) if at not in numbers]
    assert [] == passed
    assert 0 not in numbers, [message for name, message in told if name.startswith("b0_")]

"""Recipes of docs/guides/log-shippers.md: they read the log that we write. The programs themselves are not run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from exporters.requests.record import RequestRecord, timestamp
from stack.lab.install import InstalledPart

PAGE = Path(__file__).parents[2] / "docs/guides/log-shippers.md"
RECIPES = dict(re.findall(r"<!-- recipe: (\S+) -->\n```\w+\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
FIELDS = {field.name for field in msgspec.structs.fields(RequestRecord)}
LOG = "/var/log/vllm-watch/requests.jsonl"
LABELS = {"team", "model", "outcome"}
ENDED_S = 1_790_000_000.123


def of(name: str) -> Any:
    return yaml.safe_load(RECIPES[name])


def test_every_shipper_has_its_recipe():
    assert {"vector", "fluent-bit", "alloy", "otelcol"} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_read_the_same_file(name: str):
    assert {LOG} == set(re.findall(r"/\S*\.jsonl", RECIPES[name]))


def test_fields_exist_and_labels_are_bounded():
    """A label with a value for each request would be a stream of its own."""
    vector = of("vector")["sinks"]["loki"]["labels"]
    fluent = of("fluent-bit")["pipeline"]["outputs"][0]["label_keys"]
    alloy = RECIPES["alloy"]
    in_labels = re.search(r"stage\.labels \{\s*values = \{(.*?)\}", alloy)
    in_json = re.search(r"expressions = \{(.*?)\}", alloy)
    assert in_labels
    assert in_json
    named = {
        "vector": {re.sub(r"[{} ]", "", value) for key, value in vector.items() if key != "job"},
        "fluent-bit": {key.removeprefix("$") for key in fluent.split(",")},
        "alloy": set(re.findall(r"(\w+) =", in_labels[1])),
    }
    assert dict.fromkeys(named, LABELS) == named
    parsed = set(re.findall(r"(\w+) =", in_json[1]))
    collected = set(re.findall(r"attributes\.(\w+)", RECIPES["otelcol"]))
    assert parsed | collected | LABELS <= FIELDS
    assert LABELS <= parsed


def test_time_layouts_read_the_time_of_a_record():
    """Each layout in Python's terms; Vector's %+ and Alloy's RFC3339Nano are RFC 3339."""
    written = timestamp(ENDED_S)
    ended = datetime.fromtimestamp(ENDED_S, UTC)
    parser = of("fluent-bit")["parsers"][0]
    block = of("otelcol")["receivers"]["filelog"]["operators"][0]["timestamp"]
    assert ("ts", "attributes.ts", "UTC") == (parser["time_key"], block["parse_from"], block["location"])
    for layout in (parser["time_format"], block["layout"]):
        read = datetime.strptime(written, layout.replace("%L", "%f"))
        assert ended == read.replace(tzinfo=UTC), layout
    assert ended == datetime.fromisoformat(written)
    assert 'parse_timestamp!(string!(.ts), "%+")' in RECIPES["vector"]
    assert re.search(r'source = "ts"\n\s+format = "RFC3339Nano"', RECIPES["alloy"])


def test_parts_of_a_recipe_refer_to_each_other():
    vector, fluent = of("vector"), of("fluent-bit")
    assert vector["transforms"]["records"]["inputs"] == list(vector["sources"])
    assert vector["sinks"]["loki"]["inputs"] == list(vector["transforms"])
    (tail,), (loki,) = fluent["pipeline"]["inputs"], fluent["pipeline"]["outputs"]
    assert (tail["parser"], tail["tag"]) == (fluent["parsers"][0]["name"], loki["match"])
    alloy = RECIPES["alloy"]
    components = {".".join(found) for found in re.findall(r'^([\w.]+) "(\w+)" \{', alloy, re.MULTILINE)}
    assert {found.removesuffix(".receiver") for found in re.findall(r"forward_to = \[(.*?)\]", alloy)} < components
    assert alloy.count("{") == alloy.count("}")


@pytest.mark.collector
def test_collector_takes_the_pipeline(part: Callable[[str], InstalledPart], tmp_path: Path):
    """The core collector has no filelog receiver and no file storage: OTLP stands in its place."""
    content = of("otelcol")
    assert ["file_storage"] == content["service"].pop("extensions") == list(content.pop("extensions"))
    assert "file_storage" == content["receivers"].pop("filelog")["storage"]
    content["receivers"]["otlp"] = {"protocols": {"http": {"endpoint": "127.0.0.1:0"}}}
    assert ["filelog"] == content["service"]["pipelines"]["logs"]["receivers"]
    content["service"]["pipelines"]["logs"]["receivers"] = ["otlp"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    command = [part("otelcol").path, "validate", f"--config={tmp_path / 'config.yaml'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)

"""What becomes of a line is told by those who read and count it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from exporters.requests.explain import as_text, explain
from exporters.requests.record import FieldMap
from exporters.sidecar_config import SidecarConfig, TeamSettings, counting
from stack.cli import main

MAPPED = SidecarConfig(
    field_names={
        "id": "request_id",
        "duration": "e2e_s",
        "usage.prompt_tokens": "prompt_tokens",
        "usage.cached": "cached_tokens",
        "state": "outcome",
    },
    field_values={"outcome": {"done": "ok"}},
)
FOREIGN = b'{"id":"r1","duration":1.25,"usage":{"prompt_tokens":7},"state":"done","modelName":"x","model":"tiny","secret":"s3"}'  # noqa: E501


def _counted(told: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(gain["series"], ",".join(gain["labels"].values())): gain["amount"] for gain in told["counted"]}


def test_a_foreign_line_is_told_field_by_field():
    told = explain(FOREIGN, MAPPED.fields)
    rows = [(f["field"], f["from"], f["value"], f["unit"], f["refused"]) for f in told["fields"]]
    assert ("request_id", "id", "r1", "", None) in rows
    assert ("e2e_ms", "duration", 1250.0, "ms", None) in rows
    assert ("prompt_tokens", "usage.prompt_tokens", 7, "tokens", None) in rows
    assert ("outcome", "state", "ok", "", None) in rows
    assert ["modelName", "secret"] == [i["name"] for i in told["ignored"]]
    assert [{"name": "usage.cached", "field": "cached_tokens"}] == told["absent"]
    assert told["refused"] is None


def test_it_says_what_is_counted_and_nothing_else():
    told = explain(FOREIGN, MAPPED.fields)
    assert {
        ("vllm_watch_requests_total", "tiny,ok,__unknown__"): 1,
        ("vllm_watch_tokens_total", "tiny,__unknown__,prompt"): 7,
        ("vllm_watch_e2e_seconds", "tiny,__unknown__"): 1.25,
    } == _counted(told)
    assert any(note.startswith("no team") for note in told["notes"])
    assert any(note.startswith("no ts") for note in told["notes"])


def test_a_team_beyond_the_table_is_told_as_it_is_counted():
    counters = counting(SidecarConfig(teams=TeamSettings(configured=("a",), limit=1)))
    told = explain(b'{"request_id":"x","team":"late"}', counters=counters)
    assert {"__other__"} == {gain["labels"]["team"] for gain in told["counted"]}


def test_every_fault_of_a_line_is_told_not_the_first_alone():
    told = explain(b'{"request_id":7,"ts":"x","e2e_ms":-1,"outcome":"odd","model":"tiny","promptTokens":3}')
    assert {"request_id", "ts", "e2e_ms", "outcome"} == {f["field"] for f in told["fields"] if f["refused"]}
    assert "type" == told["refused"]["reason"]
    assert [{"name": "promptTokens", "near": "prompt_tokens"}] == told["ignored"]
    assert [] == told["counted"]


def test_a_status_is_not_taken_for_an_outcome():
    (note,) = [note for note in explain(b'{"request_id":"x","status":200}')["notes"] if "outcome" in note]
    assert "field_values" in note


@pytest.mark.parametrize(
    ("line", "reason", "noted"),
    [
        (b'{"request_id":"a","mo{"request_id":"b"}', "torn", "after the break"),
        (b'{"request_id":"a"}{"request_id":"b"}', None, "two records"),
        (b"no json", "json", None),
        (b'{"id":"a"}', "type", "field_names: {their_name: request_id}"),
        (b'{"request_id":"a","prompt_tokens":1,"cached_tokens":2}', "range", None),
    ],
)
def test_a_broken_line_is_told_as_it_is_counted(line: bytes, reason: str | None, noted: str | None):
    told = explain(line)
    assert reason == (told["refused"] and told["refused"]["reason"])
    assert noted is None or any(noted in note for note in told["notes"])


def test_summed_prompt_names_its_parts():
    fields = FieldMap({"in": "prompt_fresh_tokens", "read": "cached_tokens"})
    summary = explain(b'{"request_id":"a","in":5,"read":2,"made":1}', fields)
    assert ("in + read", 7) == next((f["from"], f["value"]) for f in summary["fields"] if f["field"] == "prompt_tokens")
    assert ["made"] == [one["name"] for one in summary["ignored"]]


def test_text_is_safe_for_a_terminal():
    """The text says what was found and holds nothing that a terminal acts on."""
    text = as_text(explain(b'{"request_id":"\\u001b[2J","\\u001b[31m":1,"e2e_ms":48.7}'))
    assert "\x1b" not in text
    assert (
        'vllm_watch_requests_total{model_name="__unknown__",outcome="unknown",team="__unknown__"} grows by 1 requests'
        in text
    )
    assert "48.7 ms" in text


def _run(*arguments: str, given: bytes = b"") -> Result:
    return CliRunner().invoke(main, ["sidecar", "explain", *arguments], input=given)


def test_the_command_reads_an_argument_or_the_standard_input(tmp_path: Path):
    settings = tmp_path / "sidecar.yaml"
    settings.write_text("field_names: {id: request_id, duration: e2e_s}\n")
    assert 0 == _run('{"request_id":"x"}').exit_code
    assert 1 == _run(given=b'{"request_id":"x"}\n\nno\n').exit_code
    result = _run("--config", str(settings), "--json", given=b'{"id":"x","duration":2}\n{"id":"y"}\n')
    first, second = map(json.loads, result.stdout.splitlines())
    assert (0, 2000.0, "y") == (result.exit_code, first["fields"][1]["value"], second["fields"][0]["value"])


def test_what_cannot_be_explained_is_a_mistake_of_the_caller(tmp_path: Path):
    settings = tmp_path / "sidecar.yaml"
    settings.write_text("field_names: {id: request}\n")
    for result in (_run("--config", str(settings), "x"), _run(given=b"\n")):
        assert (2, "Error: ") == (result.exit_code, result.stderr[:7])


def test_the_example_of_the_help_runs():
    example = next(line for line in _run("--help").stdout.splitlines() if "Example:" in line)
    line = example[example.index("'") + 1 : example.rindex("'")]
    assert 0 == _run(line).exit_code

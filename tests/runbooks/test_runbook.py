"""The runbook book and `vllm-watch runbook`: reading, finding, filling against hostile labels, checking; then real
parts that answer, or do not."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from alerts.registry import ALERTS, RECORDINGS
from alerts.rules import Links
from exporters.catalogue import EVERYTHING, promql, promql_ast, vllm
from exporters.net.alertmanager import Firing
from exporters.net.prometheus import QueryResult, QuerySeries, address
from runbooks import lookup, page_check, search
from runbooks import page as book
from runbooks.diagnosis.row import DiagnosisRow
from stack import render
from stack.board import pages as html_pages
from stack.cli import main
from tests.support.ports import free_port
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
PAGE = r"""---
related: [VLLMEngineDown]
reviewed: 2026-03-01
---
# VLLMKVCacheNearlyFull

## Do this first

1. Check if it answers.

   ```bash
   curl -sS http://{{instance}}/health
   ```

## Meaning

The cache of an engine, e.g. that of `llama`, is nearly full. Then it preempts.

## Impact

Nobody notices yet. It stands in [another page](VLLMEngineDown.md#meaning).

## First five minutes

1. How full is it?

   ```promql
   max by (instance) (vllm:kv_cache_usage_perc{instance=~"{{instance}}"})
   ```
2. Does it answer? Only reads.

   ```bash
   ## don't worry
   curl -sS http://{{instance}}/health
   ```
   And who asks?

   ```promql
   sum by (team) (rate(vllm_watch_requests_total{team=~"{{ team }}"}[5m]))
   ```

## Diagnosis

<!-- printed: diagnosis -->
| Row | What you see | Likely cause | Go to |
|---|---|---|---|
| 1 | preemptions | promised twice \| or more | Mitigation 2, then 1 |
| 2 | full and quiet | long ones | Mitigation 1 |
| 3 | the engine is gone | it died | [VLLMEngineDown](VLLMEngineDown.md) |

Conditions:

1. preemptions:

   ```promql
   rate(vllm:num_preemptions_total{instance=~"{{instance}}"}[5m]) > 0
   ```
2. full and quiet:

   ```promql
   vllm:num_requests_running{instance=~"{{instance}}",engine=~"0|1"} < 1
   ```
3. the engine is gone:

   ```promql
   sum(rate(vllm:x[)
   ```
<!-- end -->

## Mitigation

1. **Send less.** Slowly.
2. **Add one.** Undo: take it away.

## Escalation

Call someone.

## Rule and threshold

<!-- printed: rule -->
<!-- end -->

<!-- printed: threshold -->
<!-- end -->

Seldom wrong.
"""
OTHER = (
    PAGE.replace("VLLMKVCacheNearlyFull", "VLLMEngineDown", 1)
    .replace("VLLMEngineDown]", "VLLMKVCacheNearlyFull]")
    .replace("# VLLMKVCacheNearlyFull", "# VLLMEngineDown")
    .replace("severity: warning", "severity: critical")
    .replace("[VLLMEngineDown](VLLMEngineDown.md)", "[rollback](rollback.md)")
)
FREE = (
    "# Going back\n\nHow one returns to what worked. With care.\n\n## Engine {{instance}}\n\nSee [the"
    " alert](VLLMEngineDown.md).\n"
)
HERE = {"instance": "10.0.0.1:8000", "model_name": "llama"}


@pytest.fixture
def folder(tmp_path):
    """A small book that is whole."""
    made = tmp_path / "book"
    made.mkdir()
    for name, text in (("VLLMKVCacheNearlyFull", PAGE), ("VLLMEngineDown", OTHER), ("rollback", FREE)):
        (made / f"{name}.md").write_text(text)
    return made


@pytest.fixture
def small(folder, monkeypatch):
    """The command reads the small book."""
    shown = book.pages(folder)
    monkeypatch.setattr(book, "pages", lambda: shown)
    return shown


def page(text=PAGE, name="VLLMKVCacheNearlyFull"):
    return book.parse(name, text)


def command(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["runbook", *arguments], input=stdin)


# --- reading


def test_a_page_is_read_into_values():
    read = page()
    assert ("warning", ("VLLMEngineDown",), "") == (read.severity, read.related, read.wrong)
    assert book.HEADINGS == tuple(section.heading for section in read.sections), "a comment of a shell is no heading"
    assert read.gist.endswith("is nearly full."), "the first sentence alone"
    assert "e.g." in read.gist, "an abbreviation ends no sentence"
    assert [1, 2] == [step.number for step in read.steps]
    assert "Does it answer? Only reads." == read.steps[1].text
    assert ["bash", "promql"] == [block.language for block in read.steps[1].blocks]
    assert "## don't worry\ncurl -sS http://{{instance}}/health" == read.steps[1].blocks[0].text
    assert ["preemptions", "full and quiet"] == [row.what for row in read.rows[:2]]
    assert ("sum(rate(vllm:x[)", "it died", "[VLLMEngineDown](VLLMEngineDown.md)") == (
        read.rows[2].condition,
        read.rows[2].cause,
        read.rows[2].go_to,
    )
    assert 'engine=~"0|1"' in read.rows[1].condition
    assert "promised twice | or more" == read.rows[0].cause, "a bar inside a cell is escaped in Markdown alone"
    assert ["curl -sS http://{{instance}}/health"] == [block.text for block in read.first[0].blocks]
    assert "<!--" not in read.body
    assert read.body.startswith("# VLLMKVCacheNearlyFull\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "# Only a title",
        "---\nalert: [\n---\n# x\n",
        "---\n- a\n---\n",
        "# x\n## Diagnosis\n| a |\n",
        "```\n",
    ],
)
def test_a_page_that_is_not_whole_is_shown_all_the_same(text):
    read = page(text)
    assert read.wrong
    assert (read.steps, read.rows) == ((), ())
    assert lookup.as_text(read, {}, None).startswith("# ")
    assert json.dumps(lookup.as_json(read, {}, None))


def test_only_pages_are_read(folder):
    assert ["VLLMEngineDown", "VLLMKVCacheNearlyFull", "rollback"] == [one.name for one in book.pages(folder)]
    assert (folder / "rollback.md").read_text() == book.text("rollback", folder)
    assert [None] * 4 == [book.text(name, folder) for name in ("../conftest", "book.py", "", "VLLMEngineDown.md")]


# --- finding


@pytest.mark.parametrize(
    ("query", "expected", "by_name"),
    [
        ("VLLMEngineDown", ["VLLMEngineDown"], True),
        ("vllmenginedown", ["VLLMEngineDown"], True),
        ("engine-down", ["VLLMEngineDown"], True),
        ("Engine Down", ["VLLMEngineDown"], True),
        ("rollback.md", ["rollback"], True),
        ("http://127.0.0.1:9402/runbooks/VLLMEngineDown", ["VLLMEngineDown"], True),
        ("VLLMEngineDwon", ["VLLMEngineDown"], False),
        ("kvcachenearlyful", ["VLLMKVCacheNearlyFull"], False),
        ("cache", ["VLLMKVCacheNearlyFull"], False),  # in a name, which beats the text of the others
        ("going back", ["rollback"], False),
        ("returns", ["rollback"], False),
        ("engine preempts", ["VLLMEngineDown"], False),
        ("preempts", ["VLLMEngineDown", "VLLMKVCacheNearlyFull"], False),
        ("cache zebra", [], False),
        ("zebra", [], False),
        ("", [], False),
        ("---", [], False),
    ],
)
def test_find_page_by_name_likeness_and_words(query, expected, by_name, folder):
    """A page is found by name then by likeness then by its words."""
    found = search.find(query, book.pages(folder))
    assert (expected, by_name) == ([one.name for one in found.pages], found.by_name)


@pytest.mark.parametrize(
    ("words", "query", "labels"),
    [
        (["kv", "cache"], "kv cache", {}),
        (["EngineDown", "instance=10.0.0.1:8000"], "EngineDown", {"instance": "10.0.0.1:8000"}),
        (
            ["http://127.0.0.1:9402/runbooks/VLLMEngineDown?instance=10.0.0.1%3A8000&model_name=a+b&live=1"],
            "VLLMEngineDown",
            {"instance": "10.0.0.1:8000", "model_name": "a b"},
        ),
        (["https://wiki/x/VLLMEngineDown/"], "VLLMEngineDown", {}),
    ],
)
def test_words_of_a_notification_name_page_and_labels(words, query, labels):
    assert (query, labels) == search.split_query(words)


def test_who_finds_nothing_is_offered_names(folder):
    assert ["VLLMEngineDown"] == search.nearest("VLLMEnginesAreAllDown", book.pages(folder))[:1]


# --- filling


def test_known_labels_are_filled_and_unknown_ones_ask_for_all():
    filled = page().filled({"instance": "10.0.0.1:8000"})
    assert (
        r'max by (instance) (vllm:kv_cache_usage_perc{instance=~"10\\.0\\.0\\.1:8000"})'
        == filled.steps[0].blocks[0].text
    )
    assert "curl -sS http://10.0.0.1:8000/health" == filled.steps[1].blocks[0].text.splitlines()[1]
    assert 'team=~".*"' in filled.steps[1].blocks[1].text
    empty = page().filled({})
    assert "curl -sS http://INSTANCE/health" == empty.steps[1].blocks[0].text.splitlines()[1]
    assert 'vllm:num_preemptions_total{instance=~".*"}' in empty.rows[0].condition
    assert "{{" not in empty.text


HOSTILE = [
    "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "x; touch pwned", "x\ntouch pwned\n",
    "'\"'$(touch pwned)'\"'",
    "a b", "a|b", "${HOME}", "$'\\''$(touch pwned)", "\\", "x\\", "!!", "-o pwned", "* ?", "{{team}}",
    "```\ntouch pwned", "\x1b[2J",
    "\u202egpj", "#x", "EOF\ntouch pwned", ")$(touch pwned)", "é", "~",
]  # fmt: skip


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1) | st.sampled_from(HOSTILE))
def test_any_value_becomes_a_matcher_for_just_this_value(value):
    """In a block and in a table, as the real parser of PromQL reads it."""
    text = (
        '```promql\nup{instance=~"{{instance}}",job="x"}\n```\n## Diagnosis\n\n| Row | What you see | Likely'
        " cause | Go to |\n|---|---|---|---|\n| 1 | a | b | c |\n\n1. a:\n\n   ```promql\n"
        '   up{instance=~"{{instance}}",job="x"}\n   ```\n'
    )
    filled = book.fill(text, {"instance": value})
    assert len(text.splitlines()) == len(filled.splitlines()), "no value makes a line"
    for query in (filled.splitlines()[1], page(filled).rows[0].condition):
        (selector,) = promql_ast.selectors(query)
        assert ("up", ("job", "=", "x")) == (selector[0], selector[1][1])
        name, operator, pattern = selector[1][0]
        assert ("instance", "=~") == (name, operator)
        assert re.fullmatch(pattern, value)
        assert not re.fullmatch(pattern, value + "x")
        assert query.isprintable()


@pytest.mark.parametrize(
    "line",
    [
        "echo {{instance}}",
        "echo http://{{instance}}/health",
        'echo "{{instance}}"',
        "echo '{{instance}}'",
        'echo "$(echo {{instance}})"',
        'echo "$(echo "{{instance}}")"',
        "echo `echo {{instance}}`",
        "cat <<EOF\n{{instance}}\nEOF",
        "# don't {{instance}}\necho {{instance}}",
        "eval echo {{instance}}",
        "sh -c 'echo {{instance}}'",
        'bash -c "echo {{instance}}"',
        "echo a 'b c' \"d\" {{instance}} 'e'",
        "echo \\' {{instance}}",
        'echo "it\'s" {{instance}}',
        'echo ${HOME:+"{{instance}}"}',
        "echo $'\\'' {{instance}}",
        "# see {{instance}}\necho x # {{instance}}",
    ],
)
def test_no_value_is_more_to_a_shell_than_a_word(line, tmp_path):
    """The real bash runs what a person would paste; a hostile value shows as it is, or its place keeps the name of the
    label. One bash for all values, each in a subshell and a folder of its own."""
    for number, value in enumerate(HOSTILE):
        filled = book.fill(f"   ```bash\n{line}\n   ```\n", {"instance": value})
        (tmp_path / f"{number}" / "here").mkdir(parents=True)
        (tmp_path / f"{number}" / "pasted").write_text("\n".join(filled.splitlines()[1:-1]))
    paste = '(cd "$at/here"; eval "$(<../pasted)") >"$at/out" 2>"$at/err"; echo $? >"$at/rc"'
    subprocess.run(["bash", "-c", f'for at in "$PWD"/*; do {paste}; done'], cwd=tmp_path, check=True)
    for number, value in enumerate(HOSTILE):
        folder = tmp_path / f"{number}"
        commands = (folder / "pasted").read_text()
        assert [] == list((folder / "here").iterdir()), commands
        assert ("0\n", "") == ((folder / "rc").read_text(), (folder / "err").read_text()), commands
        if line.startswith("echo {{"):
            assert (folder / "out").read_text() in (value + "\n", "INSTANCE\n")


@pytest.mark.parametrize(
    ("value", "shown"),
    [("10.0.0.1:8000", "10.0.0.1:8000"), ("a b", "'a b'"), ("it's", "'it'\"'\"'s'"), ("-x", "TEAM"), ("a`b", "TEAM")],
)
def test_quote_value_for_a_shell(value, shown):
    """A value is quoted where a shell needs it and left out where nothing helps."""
    assert f"```bash\nls {shown}\n```" == book.fill("```bash\nls {{team}}\n```", {"team": value})


def test_words_around_the_code_get_plain_values_only():
    assert "team-a, NAME, [x](y)" == book.fill(
        "{{team}}, {{name}}, [x](y)", {"team": "team-a", "name": "[x](javascript:y)"}
    )


# --- printing into a page

FACTS = book.Facts(
    'x{a=~"\\\\d"} > 1',
    "5m",
    ("90 %. Because.", "Source: us."),
    (DiagnosisRow("full", 'x{a=~"b|c"} > 1', "it is full", "Mitigation 1"),),
)


def test_printed_parts_follow_the_alert_and_the_rest_stays():
    stamped = book.stamped(PAGE, FACTS)
    front = stamped.split("---\n")[1].splitlines()
    assert ["related: [VLLMEngineDown]", "reviewed: 2026-03-01"] == front
    assert ' 5m:\n\n```promql\nx{a=~"\\\\d"} > 1\n```\n<!-- end -->' in stamped
    assert "<!-- printed: threshold -->\n90 %. Because.\n\nSource: us.\n<!-- end -->\n\nSeldom wrong." in stamped
    assert "| 1 | full | it is full | Mitigation 1 |\n\n" in stamped
    assert '1. full:\n\n   ```promql\n   x{a=~"b|c"} > 1\n   ```\n<!-- end -->' in stamped
    assert FACTS.rows == page(stamped).rows
    assert stamped == book.stamped(stamped, FACTS)
    added = [line for line in stamped.splitlines() if line not in PAGE.splitlines()]
    assert 13 >= len(added), added


def test_keep_text_of_a_page_without_regions_or_a_torn_one():
    assert "# x\n" == book.stamped("# x\n", FACTS)
    torn = PAGE.replace("<!-- end -->", "", 1)
    assert "Nobody notices yet" in book.stamped(torn, FACTS)


def test_an_alert_that_waits_for_nothing_says_so():
    stamped = book.stamped(PAGE, book.Facts("up", "0s", ()))
    rule = stamped.partition("<!-- printed: rule -->")[2].partition("<!-- end -->")[0]
    assert "as soon as" in rule
    assert "0s" not in rule


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_text_is_promql_and_names_its_threshold(alert):
    """What is printed of an alert is PromQL and names its number."""
    facts = render.facts(alert)
    assert promql_ast.names(facts.expr) == promql_ast.names(alert.expr)
    assert alert.threshold or "no number" in facts.threshold[0]
    assert not alert.threshold or facts.threshold[0].startswith(alert.threshold.shown)


# --- checking


def test_a_whole_book_has_no_fault(folder):
    assert [] == list(page_check.faults(["VLLMKVCacheNearlyFull", "VLLMEngineDown"], folder))


@pytest.mark.parametrize(
    ("before", "after", "fact"),
    [
        ("---\nrelated", "related", "no front matter"),
        ("related: [", "related: [[", "no YAML"),
        ("reviewed: 2026-03-01\n", "", "nothing of reviewed"),
        ("reviewed:", "severity: warning\nreviewed:", "says severity"),
        ("related: [VLLMEngineDown]", "related: VLLMEngineDown", "list as related"),
        ("related: [VLLMEngineDown]", "related: [VLLMX]", "related to VLLMX"),
        ("reviewed: 2026-03-01", "reviewed: lately", "no date"),
        ("# VLLMKV", "# VLLMXV", "open with"),
        ("## Impact", "## Effect", "Meaning, Effect"),
        ("Seldom", "TODO", "holds a TODO"),
        ("<!-- printed: rule -->", "", "<!-- printed: rule -->"),
        ("VLLMEngineDown.md#meaning", "VLLMX.md", "links to VLLMX.md"),
        ("VLLMEngineDown.md#meaning", "VLLMEngineDown.md#gist", "no heading"),
        ("VLLMEngineDown.md#meaning", "#gist", "#gist, where no"),
        ("VLLMEngineDown.md#meaning", "../README.md", "README.md, which is"),
        ("3. the engine is gone:", "4. the engine is gone:", "no condition for 'the engine"),
        ("1. Check if", "Check if", "one to three"),
        ("```bash\n   curl", "```promql\n   curl", "without PromQL"),
        ("Mitigation 2, then 1", "Mitigation 2, then 3", "to Mitigation 3"),
        ("Mitigation 2, then 1", "whoever knows", "neither to Mitigation"),
        ("2. **Add", "3. **Add", "from 1 under Mitigation"),
        ('{instance=~"{{instance}}"})', '{instance="{{instance}}"})', 'other than as =~"{{instance}}"'),
    ],
)
def test_every_fault_of_a_page_is_told_with_its_name(before, after, fact, folder):
    (folder / "VLLMKVCacheNearlyFull.md").write_text(PAGE.replace(before, after, 1))
    found = list(page_check.faults(["VLLMKVCacheNearlyFull", "VLLMEngineDown"], folder))
    assert found
    assert all(fault.startswith("VLLMKVCacheNearlyFull.md ") for fault in found if "related to" not in fault)
    assert fact in "\n".join(found)


def test_pages_and_alerts_match_one_to_one(folder):
    """Pages and alerts match one to one and free pages are checked too."""
    (folder / "rollback.md").write_text("# Going back\n\n[gone](VLLMGone.md) TBD\n")
    found = list(page_check.faults(["VLLMEngineDown", "VLLMMissing"], folder))
    assert any(re.fullmatch("VLLMMissing .*no page", fault) for fault in found)
    assert any(fault.startswith("VLLMKVCacheNearlyFull.md belongs") for fault in found)
    assert "rollback.md holds a TBD" in found
    assert "rollback.md links to VLLMGone.md" in "\n".join(found)


def test_a_page_that_nobody_looked_at_for_a_year_is_a_warning(folder):
    assert [] == list(page_check.warnings(datetime.date(2027, 3, 1), folder))
    words = [warning.split() for warning in page_check.warnings(datetime.date(2027, 3, 2), folder)]
    assert [("VLLMEngineDown.md", "2026-03-01"), ("VLLMKVCacheNearlyFull.md", "2026-03-01")] == [
        (name, date) for name, *_, date in words
    ]


@pytest.mark.parametrize("shipped", book.pages(), ids=lambda one: one.name)
def test_shipped_page_fills_and_its_queries_exist(shipped):
    """A default page can be filled and every query of it exists."""
    known = {sample for metric in EVERYTHING for sample in metric.samples} | {
        recording.record for recording in RECORDINGS
    }
    for labels in ({}, dict.fromkeys(book.placeholders(shipped.text), "a'b|c $(d)")):
        filled = shipped.filled(labels)
        assert "{{" not in re.sub(r"'[^']*'", "", filled.body), (
            "what curl and docker are given as a format may hold braces, inside quotes"
        )
        for query in lookup.queries(filled):
            assert promql_ast.names(query) <= known, query


# --- which alerts fire

WEBHOOK = """{"receiver":"tickets","status":"firing","alerts":[
{"status":"firing","labels":{"alertname":"VLLMKVCacheNearlyFull","instance":"10.0.0.1:8000","job":"vllm","model_name":"llama","owner":"serving","severity":"warning"},
 "annotations":{"description":"llama on 10.0.0.1:8000 uses 93%","runbook_url":"http://127.0.0.1:9402/runbooks/VLLMKVCacheNearlyFull"},
 "startsAt":"2026-03-01T03:02:11.5Z","endsAt":"0001-01-01T00:00:00Z","generatorURL":"http://p:9090/graph?g0.expr=x","fingerprint":"3b15fd163d36582e"},
{"status":"resolved","labels":{"alertname":"VLLMEngineDown","instance":"10.0.0.2:8000","job":"vllm","severity":"critical"},
 "annotations":{},"startsAt":"2026-03-01T02:00:00Z","endsAt":"2026-03-01T02:10:00Z","generatorURL":"","fingerprint":"5d1c"}],
"groupLabels":{"alertname":"VLLMKVCacheNearlyFull"},"commonLabels":{"severity":"warning"},"commonAnnotations":{},
"externalURL":"http://a:9093","version":"4","groupKey":"{}:{alertname=\\"VLLMKVCacheNearlyFull\\"}","truncatedAlerts":0}"""
API = """[{"annotations":{},"endsAt":"2026-03-01T03:10:00.000Z","fingerprint":"3b15","receivers":[{"name":"tickets"}],
"startsAt":"2026-03-01T03:02:11.500Z","status":{"inhibitedBy":[],"mutedBy":[],"silencedBy":[],"state":"active"},"updatedAt":"2026-03-01T03:06:00.000Z","generatorURL":"http://p:9090",
"labels":{"alertname":"VLLMKVCacheNearlyFull","instance":"10.0.0.1:8000","model_name":"llama","severity":"warning"}},
{"annotations":{},"endsAt":"2026-03-01T03:10:00.000Z","fingerprint":"77","receivers":[{"name":"pages"}],"startsAt":"2026-03-01T03:00:00.000Z",
"status":{"inhibitedBy":["3b15"],"mutedBy":[],"silencedBy":[],"state":"suppressed"},"updatedAt":"2026-03-01T03:06:00.000Z",
"labels":{"alertname":"VLLMEngineDown","instance":"$(touch pwned)","severity":"critical"}},
{"annotations":{},"fingerprint":"9","startsAt":"2026-03-01T01:00:00.000Z","status":{"state":"active"},"labels":{"alertname":"Theirs","node":"n\\u001b[2J"}}]"""


@pytest.mark.usefixtures("small")
def test_one_alert_of_a_webhook_opens_its_page_with_its_labels(tmp_path):
    (tmp_path / "body.json").write_text(WEBHOOK)
    for done in (
        command("--from-alertmanager", str(tmp_path / "body.json")),
        command("--from-alertmanager", "-", stdin=WEBHOOK),
    ):
        assert 0 == done.exit_code, done.output
        assert done.output.startswith("# VLLMKVCacheNearlyFull\n")
        assert "curl -sS http://10.0.0.1:8000/health" in done.output
        assert r'vllm:num_preemptions_total{instance=~"10\\.0\\.0\\.1:8000"}' in done.output
        assert "`model_name=llama`" in done.output


@pytest.mark.usefixtures("small")
def test_alerts_are_listed_most_urgent_first():
    """Several alerts are listed the most urgent first each with its command."""
    done = command("--from-alertmanager", "-", stdin=API)
    assert 0 == done.exit_code
    assert ["critical", "warning", "-"] == [
        line.split()[0] for line in done.output.splitlines() if re.match(r"\S", line)
    ]
    assert "vllm-watch runbook VLLMKVCacheNearlyFull --label instance=10.0.0.1:8000" in done.output
    assert "vllm-watch runbook VLLMEngineDown --label 'instance=$(touch pwned)'" in done.output
    assert "since 2026-03-01T03:00:00.000Z, muted" in done.output
    assert "no page" in done.output.partition("Theirs")[2]
    assert "\x1b" not in done.output
    told = json.loads(command("--from-alertmanager", "-", "--json", stdin=API).output)
    assert ["VLLMEngineDown", "VLLMKVCacheNearlyFull", None] == [row["page"] for row in told]
    assert "curl -sS http://10.0.0.1:8000/health" in told[1]["sections"]["First five minutes"]


def test_an_alert_that_always_fires_is_listed_and_not_opened():
    def chosen(*names: str, with_constant: bool = False) -> lookup.PageChoice:
        alerts = [Firing({"alertname": name}, {}, "2026-11-24T10:00:00Z") for name in names]
        return lookup.choose("", alerts, {}, book.pages(), with_constant=with_constant)

    assert (None, 0) == ((alone := chosen("VLLMWatchdog")).page, alone.status)
    assert "VLLMWatchdog" in alone.message
    assert "VLLMEngineDown" == chosen("VLLMWatchdog", "VLLMEngineDown").page.name
    assert "VLLMWatchdog" == chosen("VLLMWatchdog", with_constant=True).page.name


def test_a_label_that_no_page_uses_is_reported():
    done = command("VLLMQueueTimeHigh", "model=tiny", "instance=10.0.0.1:8000")
    assert re.fullmatch(r"note: .* model;.* model_name\?\n", done.stderr)
    assert "" == command("VLLMQueueTimeHigh", "model_name=tiny", "job=vllm").stderr


def test_page_and_panel_of_an_alert_are_where_the_alert_says():
    """It knows where boards and pages are served, under --port-offset and in a wiki; this machine's usual ports are a
    guess."""
    own = {
        "runbook_url": "https://wiki/vllm/VLLMWatchdog",
        "dashboard_url": "https://grafana/sub/d/vllm-watch-overview?viewPanel=188949",
    }
    firing = json.dumps([{"labels": {"alertname": "VLLMWatchdog"}, "annotations": own}])
    ask = ("--from-alertmanager", "-")
    assert f"panel: {own['dashboard_url']}\n" in command(*ask, stdin=firing).output
    assert own["runbook_url"] == command(*ask, "--print-url", stdin=firing).output.strip()
    assert (
        "https://mine/VLLMWatchdog"
        == command(*ask, "--print-url", "--base", "https://mine", stdin=firing).output.strip()
    )
    elsewhere = json.dumps(
        [
            {
                "labels": {"alertname": "VLLMWatchdog"},
                "annotations": {"dashboard_url": "https://x", "runbook_url": "https://x"},
            }
        ]
    )
    told = json.loads(command(*ask, "--json", stdin=elsewhere).output)
    assert ("http://127.0.0.1:9402/runbooks/VLLMWatchdog", True) == (
        told["url"],
        told["panel_url"].startswith("http://127.0.0.1:3000/d/"),
    )


@pytest.mark.usefixtures("small")
def test_a_name_or_a_label_chooses_among_alerts():
    assert 'instance=~"10' in command("kvcachenearlyfull", "--from-alertmanager", "-", stdin=API).output
    twice = json.dumps([{"labels": {"alertname": "VLLMEngineDown", "instance": each}} for each in "ab"])
    done = command("enginedown", "--from-alertmanager", "-", stdin=twice)
    assert (
        'instance=~"b"'
        in command("enginedown", "--label", "instance=b", "--from-alertmanager", "-", stdin=twice).output
    )
    assert (2, True) == (done.exit_code, bool(re.search(r"^2 alerts: .*--label$", done.output, re.MULTILINE)))
    assert 2 == command("--print-url", "--from-alertmanager", "-", stdin=twice).exit_code
    quiet = command("kvcachenearlyfull", "--from-alertmanager", "-", stdin=twice)
    assert (0, True) == (quiet.exit_code, quiet.stdout.startswith("# VLLMKVCacheNearlyFull\n"))
    assert "VLLMKVCacheNearlyFull does not" in quiet.stderr
    assert (1, "no alert fires\n") == (
        (nothing := command("--from-alertmanager", "-", stdin="[]")).exit_code,
        nothing.output,
    )


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "pattern"),
    [
        (("--from-alertmanager", "-"), "nonsense", 2, r"<stdin>: .*\(JSON is malformed"),
        (("--from-alertmanager", "-"), '{"alerts": 7}', 2, "`amtool alert -o json`"),
        (("--from-alertmanager", "-"), '[{"labels": {"a": 7}}]', 2, "Expected `str`, got `int`"),
        (("--from-alertmanager", "-"), "", 2, "<stdin>: not alerts"),
        (("--from-alertmanager", "/nonexistent"), "", 2, "/nonexistent"),
        (
            ("--firing", "--alertmanager", "http://127.0.0.1:9"),
            "",
            2,
            "Alertmanager at http://127.0.0.1:9 does not answer",
        ),
        (
            ("--firing", "--alertmanager", "http://me:secret@x"),
            "",
            2,
            "--alertmanager is no address.*http://127.0.0.1:9093",
        ),
        (("--alertmanager", "http://x"), "", 2, "--alertmanager belongs to --firing"),
        (("--list", "enginedown"), "", 2, "choose NAME, --list"),
        (("--live",), "", 2, "name a page"),
        (("enginedown", "--label", "instance"), "", 2, "is no label.*instance="),
        (("enginedown", "--section", "x"), "", 2, "--section 'x' .*Meaning, Impact"),
        (("enginedown", "--section", "m"), "", 2, "--section 'm' .*Meaning, .*Mitigation"),
        (("enginedown", "--live", "--prometheus", "x"), "", 2, "no address .*http://127.0.0.1:9090"),
        (("preempts",), "", 2, "'preempts' .*\n  VLLMEngineDown  The cache"),
        (("zebra",), "", 1, "'zebra'; vllm-watch runbook --list"),
        (("VLLMEnginesAreAllDown",), "", 1, "nearest names .*VLLMEngineDown"),
    ],
)
@pytest.mark.usefixtures("small")
def test_what_cannot_be_done_is_one_sentence_with_its_status(arguments, stdin, status, pattern):
    done = command(*arguments, stdin=stdin)
    assert (status, True) == (done.exit_code, bool(re.search(pattern, done.output))), done.output
    assert "Traceback" not in done.output
    assert "secret" not in done.output


@pytest.mark.prometheus
@pytest.mark.usefixtures("small")
def test_what_a_real_alertmanager_and_amtool_say_is_understood(part, free_port, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "alertmanager.yml").write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    amtool = [part("amtool").path, f"--alertmanager.url={url}", "alert"]
    server = [
        part("alertmanager").path,
        f"--config.file={tmp_path}/alertmanager.yml",
        f"--storage.path={tmp_path}/data",
    ]
    server += [f"--web.listen-address={url.removeprefix('http://')}", "--cluster.listen-address="]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(server, stdout=log, stderr=log) as process:
        try:
            eventually(
                lambda: command("--firing", "--alertmanager", url).exit_code == 1, what="an Alertmanager without alerts"
            )
            for labels in (("VLLMEngineDown", "instance=10.0.0.1:8000", "severity=critical"), ("Theirs", "x=y")):
                subprocess.run([*amtool, "add", *labels], check=True, capture_output=True)
            done = command("--firing", "--alertmanager", url)
            assert (0, True) == (
                done.exit_code,
                "vllm-watch runbook VLLMEngineDown --label instance=10.0.0.1:8000" in done.output,
            ), done.output
            assert (
                "curl -sS http://10.0.0.1:8000/health"
                in command("enginedown", "--firing", "--alertmanager", url).output
            )
            asked = subprocess.run([*amtool, "query", "-o", "json"], check=True, capture_output=True, text=True).stdout
            assert done.output == command("--from-alertmanager", "-", stdin=asked).output
            assert f"{url}/nowhere answers HTTP 404" in command("--firing", "--alertmanager", f"{url}/nowhere").output
        finally:
            process.terminate()


# --- what Prometheus says


@pytest.fixture(scope="module")
def prometheus(part, tmp_path_factory):
    """Twelve engines from ten minutes ago to an hour ahead, so that a test may ask for the present: full, busy, and
    none of them preempts."""
    at = int(time.time()) // 15 * 15
    folder, steps = tmp_path_factory.mktemp("prometheus"), range(at - 600, at + 3600, 15)
    series = []
    for name, value in (
        ("vllm:kv_cache_usage_perc", 0.93),
        ("vllm:num_preemptions_total", 7),
        ("vllm:num_requests_running", 3),
    ):
        for engine in range(1, 13):
            labels = f'{{job="vllm",engine="0",instance="10.0.0.{engine}:8000",model_name="\x1b[2J```"}}'
            series += [f"{name}{labels} {value} {now}" for now in steps]
    (folder / "page").write_text("\n".join(series) + "\n# EOF\n")
    subprocess.run(
        [
            part("promtool").path,
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "--quiet",
            folder / "page",
            folder / "data",
        ],
        check=True,
    )
    (folder / "prometheus.yml").write_text("global: {scrape_interval: 15s}\n")
    url = f"http://127.0.0.1:{free_port()}"
    command = [part("prometheus").path, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log, subprocess.Popen(
        [*command, f"--web.listen-address={url.removeprefix('http://')}"], stdout=log, stderr=log
    ) as process:  # fmt: skip
        try:
            eventually(lambda: 200 == urlopen(f"{url}/-/ready", timeout=5).status, what="a ready Prometheus")
            yield url
        finally:
            process.terminate()
            process.wait(60)


ONE_HOLDS = PAGE.replace('"} < 1\n', '"} > 1\n')


@pytest.mark.prometheus
def test_an_unknown_subject_is_no_data_and_not_all_clear(prometheus):
    """A Prometheus that does not scrape the engine returns nothing to every query, as a recovered one would."""
    gone = {"instance": "10.9.9.9:8000", "model_name": "llama"}
    shown = page().filled(gone)
    live = asyncio.run(lookup.ask(shown, gone, address(prometheus), time.time()))
    assert live.unseen.startswith("instance=10.9.9.9:8000")
    assert re.search(r"NO DATA: .*instance=10\.9\.9\.9:8000", lookup.as_text(shown, gone, live))
    html = html_pages.runbook_page(shown, gone, live)
    assert "NO DATA" in html
    assert "No row" not in html


def test_links_between_pages_keep_the_labels_of_the_alert():
    html = html_pages.runbook_page(page().filled(HERE), HERE, None)
    assert 'href="/runbooks/VLLMEngineDown?instance=10.0.0.1%3A8000&amp;model_name=llama#meaning"' in html
    assert 'href="/runbooks/VLLMEngineDown"' not in html


@pytest.mark.prometheus
def test_only_the_row_that_holds_is_marked(prometheus):
    """Just the row that holds is marked and what cannot be asked says why."""
    shown = page(ONE_HOLDS).filled(HERE)
    live = asyncio.run(lookup.ask(shown, {}, address(prometheus), time.time()))
    assert [False, True, None] == [live.answers[row.condition].holds for row in shown.rows]
    text = lookup.as_text(shown, HERE, live)
    now = text.partition("## Now")[2].partition("## Do this first")[0]
    assert "The threshold is 90 % (0.9)." in now
    assert re.search(r"expression: holds\n +0\.93 ", now)
    assert re.search(r"\n1\. .*\n +0\.93  instance=10\.0\.0\.1:8000\n", now)
    assert re.search(r"\n2\. .*\n +nothing came", now)
    assert re.search(r"no +preemptions\n", now)
    assert re.search(r"HOLDS +full and quiet: .* Mitigation 1\.\n +3  ", now)
    assert re.search(r"not asked +the engine .*\n   .*parse error", now)
    assert 1 == now.count("HOLDS")
    assert "\x1b" not in text
    told = lookup.as_json(shown, HERE, live)
    assert [False, True, None] == [row["holds"] for row in told["diagnosis"]]
    assert "0.93" == told["steps"][0]["commands"][0]["answer"]["rows"][0][1]


@pytest.mark.prometheus
def test_of_many_rows_the_first_are_shown_and_the_rest_counted(prometheus):
    shown = page(ONE_HOLDS).filled({})
    live = asyncio.run(lookup.ask(shown, {}, address(prometheus), time.time()))
    asked = live.answers[shown.steps[0].blocks[0].text]
    assert (lookup.MOST_ROWS, 12) == (len(asked.rows), asked.found)
    assert f"and {12 - lookup.MOST_ROWS} more" in lookup.as_text(shown, {}, live)


@pytest.mark.prometheus
@pytest.mark.usefixtures("small")
def test_the_command_asks_a_real_prometheus(prometheus):
    arguments = ("kvcachenearlyfull", "--label", "instance=10.0.0.1:8000", "--live", "--prometheus", prometheus)
    done = command(*arguments)
    assert (0, 1) == (
        done.exit_code,
        len(re.findall(r"^ +0\.93  instance=10\.0\.0\.1:8000$", done.output, re.MULTILINE)),
    )
    told = json.loads(command(*arguments, "--json").output)
    assert [False, False, None] == [row["holds"] for row in told["diagnosis"]]
    assert ("", prometheus) == (told["live"]["error"], told["live"]["prometheus"])
    part_of_it = command(*arguments, "--section", "mitig").output
    assert ["## Now", "## Mitigation"] == re.findall(r"^## .*", part_of_it, re.MULTILINE)
    assert "\n2. **Add one.**" in part_of_it.partition("## Mitigation")[2]


@pytest.mark.prometheus
@pytest.mark.parametrize("shipped", [one for one in book.pages() if lookup.queries(one)], ids=lambda one: one.name)
def test_a_real_prometheus_accepts_every_query_of_a_shipped_page(shipped, prometheus):
    """Also with labels that would end a string; what the parser of the tests forgives, the server may not."""
    for labels in ({}, dict.fromkeys(book.placeholders(shipped.text), 'a"b\\|c')):
        filled = shipped.filled(labels)
        live = asyncio.run(lookup.ask(filled, {}, address(prometheus), time.time()))
        assert {} == {query: asked.error for query, asked in live.answers.items() if asked.error}


@pytest.mark.usefixtures("small")
def test_page_without_prometheus():
    """Without Prometheus the page is there and one sentence says what is not."""
    arguments = ("enginedown", "--live", "--prometheus", "http://127.0.0.1:9")
    done = command(*arguments)
    assert (0, 1) == (done.exit_code, done.output.count("Prometheus at http://127.0.0.1:9 does not answer"))
    assert "## Mitigation" in done.output
    assert [None] * 3 == [row["holds"] for row in json.loads(command(*arguments, "--json").output)["diagnosis"]]


async def test_a_prometheus_that_never_answers_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(lookup, "ALL_S", 0.2)
    silent = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0)
    async with asyncio.timeout(30):
        live = await lookup.ask(page(), {}, address(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"), 0)
    silent.close()
    assert "no answer within 0 s" == live.error


# --- the command


@pytest.mark.usefixtures("small")
def test_text_page_has_no_markup_for_tools():
    """The whole page as text reads without markup that only tools need."""
    text = command("VLLMKVCacheNearlyFull").output
    assert text.startswith(
        "# VLLMKVCacheNearlyFull\n\n- severity: warning\n- panel:"
        " http://127.0.0.1:3000/d/vllm-watch-overview?viewPanel="
    )
    assert "- related: VLLMEngineDown\n- reviewed: 2026-03-01\n\n## Do this first\n" in text
    assert "another page (VLLMEngineDown)" in text
    assert " Go to VLLMEngineDown.\n\n  ```promql\n  sum(rate(vllm:x[)\n  ```\n\n## Mitigation\n" in text
    assert 'engine=~"0|1"} < 1\n' in text, "what is copied from here is not escaped for a table"
    assert not any(mark in text for mark in ("<!--", "reviewed: 2026-03-01\n---", "\x1b", ".md"))


@pytest.mark.usefixtures("small")
def test_the_list_the_address_and_the_json_twin():
    listed = command("--list").output
    assert command().output == listed
    assert ["critical", "warning", "-"] == [line.split()[0] for line in listed.splitlines()]
    assert "http://127.0.0.1:9402/runbooks/VLLMEngineDown\n" == command("enginedown", "--print-url").output
    assert "https://wiki/rb/rollback\n" == command("rollback", "--print-url", "--base", "https://wiki/rb/").output
    named = command("rollback", "--print-url", "--base", "https://wiki/rb", "--json").output
    assert {"page": "rollback", "url": "https://wiki/rb/rollback"} == json.loads(named)
    assert "VLLMEngineDown" == json.loads(command("--list", "--json").output)[0]["page"]
    assert {"nearest": []} == json.loads(command("zebra", "--json").output)
    assert {"several": ["VLLMEngineDown", "VLLMKVCacheNearlyFull"]} == json.loads(command("preempts", "--json").output)
    told = json.loads(command("kvcachenearlyfull", "--json", "--label", "instance=a").output)
    assert 'max by (instance) (vllm:kv_cache_usage_perc{instance=~"a"})' == told["steps"][0]["commands"][0]["text"]
    assert (list(book.HEADINGS), None, {"instance": "a"}) == (list(told["sections"]), told["live"], told["labels"])


@pytest.mark.usefixtures("small")
def test_a_page_that_was_not_named_is_announced_beside_the_page():
    done = command("cache")
    assert re.fullmatch(r".*'cache'.* VLLMKVCacheNearlyFull\n", done.stderr)
    assert done.stdout.startswith("# VLLMKVCacheNearlyFull")


def in_a_terminal(lines: int, *arguments: str) -> str:
    """What the command writes to a real pseudo-terminal of so many lines; its pager puts a mark before each line."""
    ours, theirs = pty.openpty()
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
        "PAGER": "sed s/^/PAGED/",
        "LINES": str(lines),
        "COLUMNS": "100",
    }
    called = [sys.executable, "-m", "stack.cli", "runbook", *arguments]
    process = subprocess.Popen(called, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # so Linux says that the other side was closed
        while chunk := os.read(ours, 1 << 16):
            written += chunk
    os.close(ours)
    assert 0 == process.wait(60)
    return written.decode()


def test_terminal_uses_a_pager_only_when_too_small():
    """A terminal gets a drawn page through a pager only where it is too small."""
    small, large = (in_a_terminal(lines, "VLLMWatchdog", "--section", "escal") for lines in (5, 200))
    assert "PAGED" in small
    assert "PAGED" not in large
    assert "\x1b[" in large
    assert "# VLLMWatchdog" not in large, "drawn, not as written"


def test_the_shipped_book_is_found_offline_by_a_bare_process():
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "stack.cli", "runbook", "watchdog"],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("# VLLMWatchdog\n")


# --- on the board


@pytest.mark.usefixtures("small")
def test_board_shows_page_urgency_panel_and_links(folder, monkeypatch):
    """The board shows the page its urgency its panel and links to pages."""
    monkeypatch.setattr(book, "names", lambda: ["VLLMEngineDown"])
    shown = html_pages.runbook_page(book.parse("VLLMKVCacheNearlyFull", book.fill(PAGE, {})), {}, None)
    assert '<span class="severity warning">warning</span>' in shown
    assert re.search(r'<a href="/d/vllm-watch-overview\?viewPanel=\d+">see the panel</a>', shown)
    assert 'related: <a href="/runbooks/VLLMEngineDown">VLLMEngineDown</a>' in shown
    assert '<a href="/runbooks/VLLMEngineDown#meaning">another page</a>' in shown
    assert '<h2 id="first-five-minutes">' in shown
    assert "curl -sS http://INSTANCE/health" in shown
    assert not any(mark in shown for mark in ("reviewed:", "printed: rule", "{{instance}}"))
    odd = book.parse("x", "---\nseverity: <b>\nboard: ../x\npanel: y\nrelated: 7\n---\n# x\n\ntext\n")
    assert "<p>" in html_pages.runbook_page(odd, {}, None)


def test_the_index_of_the_board_goes_by_urgency(folder):
    *_, rollback = shown_pages = book.pages(folder)
    shown = html_pages.runbook_index(shown_pages)
    found = re.findall(r'<h2>(\w+)|<a href="/runbooks/(\w+)">([\w ]+)</a> ([^<]+)', shown)
    assert ["Pages", "Tickets", "Of"] == [heading for heading, *_ in found if heading]
    assert ("", "rollback", "Going back", rollback.gist) == found[-1]
    assert rollback.gist.startswith("How one returns")
    assert found.index(("Tickets", "", "", "")) == 2


def test_links_of_the_command_can_lead_to_a_teams_own_places():
    told = lookup.as_json(page(), {}, None, links=Links("https://wiki", None))
    assert ("https://wiki/VLLMKVCacheNearlyFull", "") == (told["url"], told["panel_url"])


def test_a_page_says_the_numbers_of_a_deployment(tmp_path):
    """The rule and the threshold are those of the user's own file, everywhere that pages are shown."""
    own = tmp_path / "thresholds.yaml"
    own.write_text("thresholds: {kv_cache_usage: 0.7}\nengine_job: llm-.*\n")
    done = CliRunner().invoke(main, ["runbook", "VLLMKVCacheNearlyFull", "--thresholds", str(own)])
    assert 0 == done.exit_code, done.output
    assert re.search(r"^70 %\. .* default is 90 %", done.output, re.MULTILINE)
    assert "0.7" in done.output
    down = CliRunner().invoke(main, ["runbook", "VLLMEngineDown", "--thresholds", str(own)])
    assert 'up{job=~"llm-.*"}' in down.output
    plain = CliRunner().invoke(main, ["runbook", "VLLMKVCacheNearlyFull"])
    assert "90 %." in plain.output


def test_a_wrong_threshold_is_told_with_its_place(tmp_path):
    own = tmp_path / "thresholds.yaml"
    own.write_text("thresholds: {kv_cache_usage: 70}\n")
    done = CliRunner().invoke(main, ["runbook", "VLLMKVCacheNearlyFull", "--thresholds", str(own)])
    assert 2 == done.exit_code
    assert re.search(rf"{re.escape(str(own))}: kv_cache_usage: 70 .*\(0 to 1\)", done.output)


def test_quantiles_of_a_page_are_asked_as_panels_ask_them():
    """Steps, not conditions: what compares a quantile needs a value, and shows none."""
    step = (
        "histogram_quantile(0.95, sum by (model_name, le)"
        ' (rate(vllm:time_to_first_token_seconds_bucket{model_name=~"chat"}[1h])))'
    )
    asked = promql.bounded_quantile(0.95, vllm.TIME_TO_FIRST_TOKEN, "1h", where=('model_name=~"chat"',))
    assert f"({asked})" == lookup._with_bounds(step)
    ago = f'label_replace({step.replace("[1h]", "[1h] offset 1w")}, "when", "a week ago", "", "")'
    assert f"({asked})\nor label_replace((" in lookup._with_bounds(f"{step}\nor {ago}")
    for condition in (f"{step} > 2.5", f"{step} and on (model_name) up", "vllm:num_requests_running"):
        assert condition == lookup._with_bounds(condition)
    told = lookup._asked(
        QueryResult([QuerySeries({"model_name": "chat", "bound": "<"}, value=(1.0, "0.3"))]), in_seconds=True, only={}
    )
    assert (({"model_name": "chat"}, "< 300 ms"),) == told.rows


def test_quantiles_of_a_step_are_asked_with_bounds():
    """One that the pattern does not know would be shown without its mark."""
    steps = {
        block.text
        for one in render.pages()
        for step in one.steps
        for block in step.blocks
        if block.language == "promql"
    }
    filled = [re.sub(r"\{\{\w+\}\}", ".*", step) for step in steps if "histogram_quantile" in step]
    assert len(filled) > 15
    assert [] == [step for step in filled if '"bound"' not in lookup._with_bounds(step)]

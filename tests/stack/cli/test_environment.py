"""Environment variables of the command: addresses of the user's services, and the width of tables."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from stack.cli import main
from stack.terminal import output_width

NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens there


def run(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(main, arguments, env=variables)


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (("doctor",), "VLLM_WATCH_PROMETHEUS_URL"),
        (("doctor", "--for", "1s"), "VLLM_WATCH_ENGINE_URL"),
        (("cost",), "VLLM_WATCH_PROMETHEUS_URL"),
        (("alerts", "derive"), "VLLM_WATCH_PROMETHEUS_URL"),
        (("runbook", "--firing"), "VLLM_WATCH_ALERTMANAGER_URL"),
        (("bench", "run", "short-short"), "VLLM_WATCH_ENGINE_URL"),
    ],
)
def test_address_is_taken_from_the_environment(arguments, variable):
    done = run(*arguments, **{variable: NOWHERE})
    assert 2 == done.exit_code
    assert NOWHERE in done.output.replace("\n", "")


def test_named_source_wins_over_the_environment(tmp_path):
    log = tmp_path / "requests.jsonl"
    log.write_text("")
    done = run("cost", "--log", str(log), VLLM_WATCH_PROMETHEUS_URL=NOWHERE)
    assert NOWHERE not in done.output
    other = run("doctor", "http://127.0.0.1:10", "--for", "1s", VLLM_WATCH_PROMETHEUS_URL=NOWHERE)
    assert "127.0.0.1:10" in other.output
    assert NOWHERE not in other.output


def test_prometheus_wins_over_an_engine():
    done = run("doctor", VLLM_WATCH_PROMETHEUS_URL=NOWHERE, VLLM_WATCH_ENGINE_URL="http://127.0.0.1:10")
    assert NOWHERE in done.output
    assert "127.0.0.1:10" not in done.output


def test_columns_set_the_width_of_piped_tables():
    """Without COLUMNS a table in a pipe has its full width, which no terminal limits."""
    wide = run("alerts", "list", COLUMNS="")
    narrow = run("alerts", "list", COLUMNS="90")
    assert max(map(len, narrow.output.splitlines())) <= 90 < max(map(len, wide.output.splitlines()))


@pytest.mark.parametrize(("columns", "width"), [("", 150), ("wide", 150), ("90", None)])
def test_width_is_left_to_rich_where_it_is_known(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert width == output_width(150)

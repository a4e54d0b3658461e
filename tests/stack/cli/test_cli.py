"""The command as a whole: what is listed is there, and a process that serves for months carries only what serving
needs."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from stack.cli import COMMANDS, DEVELOPMENT, GROUPS, main
from stack.root import version

ROOT = Path(__file__).parents[3]
# What draws, what reads PromQL, what makes boards, rules and pages, and what is loaded only where a configuration asks
# for it.
NOT_FOR_SERVING = (
    "alerts", "dashboards", "runbooks", "stack.render", "alerts.managed_files", "grafanalib", "grpc", "markdown_it",
    "opentelemetry", "plotly",
    "promql_parser", "pynvml", "rich",
)  # fmt: skip
each_command = pytest.mark.parametrize("listed", [*COMMANDS, *DEVELOPMENT], ids=lambda command: command.name)


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def imported(code: str) -> set[str]:
    """Every module that a fresh interpreter has after these lines, which may also end it."""
    told = python(
        "-c", f"import atexit, json, sys\natexit.register(lambda: print(json.dumps(list(sys.modules))))\n{code}"
    )
    return set(json.loads(told.stdout.splitlines()[-1]))


def ours(modules: set[str]) -> set[str]:
    return {
        name for name in modules if name.split(".")[0] in ("alerts", "dashboards", "exporters", "runbooks", "stack")
    }


def served(topic: str, config: Path) -> set[str]:
    """Every module of a process that came as far as listening."""
    modules = imported(f"from stack.cli import main\nmain(['{topic}', 'run', '--config', {str(config)!r}])")
    assert {"uvloop", "aiohttp.web"} <= modules, f"{topic} run did not come as far as listening"
    return modules


@pytest.fixture
def taken():
    """An address where nobody can listen any more: what serves there ends by itself, after all its imports."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


# ---- what is listed


@each_command
def test_a_listed_command_is_there_under_its_name_with_its_line(listed):
    real = listed.real()
    assert (real.name, real.get_short_help_str(1000), real.hidden) == (listed.name, listed.help, listed.hidden)


def test_the_help_lists_every_command_in_its_group():
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    for title, commands in GROUPS.items():
        section = shown.split(f"{title}:\n")[1].split("\n\n")[0]
        listed = [line.split(maxsplit=1) for line in section.splitlines()]
        assert [[command.name, command.help] for command in commands] == listed
    assert not any(f"  {command.name} " in shown for command in DEVELOPMENT)


def all_commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, listed in group.commands.items():
        command = listed.real() if hasattr(listed, "real") else listed
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{path}{name} ")


def test_summaries_are_one_imperative_line():
    for path, command in all_commands(main):
        summary = (command.help or "").partition("\n")[0]
        assert 0 < len(summary) <= 60, f"{path}: {summary}"
        assert summary.endswith("."), path
        assert not re.match(r"(What|Who|How|Which|The|A|An|One|Of|Our|Those)\b", summary), f"{path}: {summary}"


def test_completion_offers_the_commands_and_those_inside_a_group():
    complete = ShellComplete(main, {}, "vllm-watch", "_VLLM_WATCH_COMPLETE")
    assert sorted(str(command.name) for command in COMMANDS) == [
        item.value for item in complete.get_completions([], "")
    ]
    assert ["backfill", "explain", "run"] == [item.value for item in complete.get_completions(["sidecar"], "")]
    assert ["--config"] == [item.value for item in complete.get_completions(["sidecar", "run"], "--c")]


def test_an_unknown_command_is_refused_in_clicks_words():
    result = CliRunner().invoke(main, ["sidecars"])
    assert 2 == result.exit_code
    assert "No such command 'sidecars'." in result.output


def test_the_module_runs_like_the_command():
    told = python("-m", "stack.cli", "--version")
    assert (0, f"vllm-watch, version {version()}\n", "") == (told.returncode, told.stdout, told.stderr)


# ---- what is imported


def test_the_list_of_commands_imports_none_of_them():
    modules = imported("from stack.cli import main\nmain(['--help'])")
    assert {"stack", "stack.cli", "stack.root"} == ours(modules)


def test_a_sidecar_carries_only_what_it_needs(tmp_path, taken):
    config = tmp_path / "sidecar.yaml"
    config.write_text(f"listen: {taken}\ngpu: 'off'\n")
    modules = served("sidecar", config)
    assert not modules & {*NOT_FOR_SERVING, "stack.gateway", "httptools"}
    stack = {name for name in ours(modules) if name.startswith("stack")}
    assert {"stack", "stack.cli", "stack.cli.common", "stack.cli.sidecar", "stack.config", "stack.root"} == stack


def test_a_gateway_carries_only_what_it_needs(tmp_path, taken):
    config = tmp_path / "gateway.yaml"
    config.write_text(f"listen: 127.0.0.1:0\nmetrics_listen: {taken}\nupstream: http://127.0.0.1:9\n")
    (tmp_path / "teams.yaml").write_text("teams: {}\n")
    assert not served("gateway", config) & {*NOT_FOR_SERVING, "exporters.sidecar", "exporters.accounting.join"}


def _options(command: click.Command, name: str) -> Iterator[tuple[str, click.Option]]:
    yield from ((name, each) for each in command.params if isinstance(each, click.Option))
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner, f"{name} {inner.name}")


def test_option_help_is_one_phrase_in_the_terms_of_the_field():
    """Complete without the option's name: 'File with a token', not 'Where it is'."""
    options = [(name, option) for listed in COMMANDS for name, option in _options(listed.real(), listed.name)]
    assert len(options) > 300
    for name, option in options:
        text = (option.help or "").split("  [default")[0]
        shown = f"{name} {option.opts[-1]}: {text}"
        if option.opts[-1] == "--help":
            continue
        assert text, shown
        assert not re.match(r"(The same|Where|How|What|As|Of|At which|Such as|With -?-?\w+\.$)\b", text), shown
        explains_values = isinstance(option.type, click.Choice) or option.opts[-1] == "--workload"
        assert len(text) <= (200 if explains_values else 100), shown


# ---- how it ends


def test_sigterm_ends_a_command_that_still_imports_its_modules():
    """The first process of a container ignores a signal without a handler."""
    code = """
import signal, sys

class Look:
    def find_spec(self, name, path, target=None):
        if name == "click":
            signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.meta_path.insert(0, Look())
sys.argv[1:] = ["--version"]
from vllm_watch import main
main()
"""
    done = python("-c", code)
    assert (-signal.SIGINT, "") == (done.returncode, done.stdout)

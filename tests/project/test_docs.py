"""What the pages say: every link leads somewhere, every command and option that they show exists, marked examples run
and print what stands there.

Marks are HTML comments right before a block, invisible to readers:
  <!-- run -->  or  <!-- run: exit 1 -->     the shell block is executed; blocks of one page share a folder, in the
  order of the page <!-- output -->                            the block is what the run before it printed; `...` stands
  for anything, alone on a line for any lines <!-- file: NAME -->  or  <!-- file: NAME as KIND -->     the block is
  written there first; KINDS are read by the product's own readers
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from alerts import export as alert_files
from alerts.registry import ALERTS
from alerts.settings import Overrides, Settings
from dashboards.lint import RULES
from dashboards.registry import BOARDS
from exporters.accounting.prices import Prices
from exporters.sidecar_config import SidecarConfig
from stack import config
from stack.bench import workload_file
from stack.capacity import worksheet
from stack.cli import COMMANDS, main
from stack.drill.drills import DRILLS
from stack.gateway.config import GatewayConfig
from stack.gateway.teams import load_policy
from stack.lab.plan import PORTS
from stack.tuning import experiment

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
INDEX = ROOT / "docs/README.md"
GLOSSARY = ROOT / "docs/glossary.md"
GRADES = {"tested live", "tested on captured data", "schema-checked", "simulated", "not tested"}
FOLDERS = ("alerts", "dashboards", "docs", "exporters", "runbooks", "stack", "tests")
STATUS = ROOT / "docs/internals/test-status.md"
NAMED = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w.*/{{}},-]+")
# Of docker compose, those that take a value as a word of its own.
TAKES_VALUE = {
    "-e",
    "-f",
    "-n",
    "-p",
    "-s",
    "-t",
    "-u",
    "-v",
    "-w",
    "--entrypoint",
    "--env-file",
    "--profile",
    "--signal",
    "--tail",
    "--timeout",
}
KINDS: dict[str, Callable[[Path], object]] = {
    "experiment": experiment.load,
    "gateway.yaml": lambda path: config.load(path, GatewayConfig),
    "prices.yaml": lambda path: config.load(path, Prices),
    "sidecar.yaml": lambda path: config.load(path, SidecarConfig),
    "slo.yaml": alert_files.objectives,
    "teams.yaml": load_policy,
    "thresholds.yml": lambda path: Settings(config.load(path, Overrides)),
    "workloads": workload_file.load,
    "worksheet.yaml": worksheet.read,
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
each_doc = pytest.mark.parametrize(
    "page", [page for page in DOCS if page not in (INDEX, STATUS, GLOSSARY)], ids=name_of
)


@cache
def tokens(page: Path) -> tuple[Token, ...]:
    return tuple(MarkdownIt("commonmark").enable("table").parse(page.read_text()))


def inline(page: Path) -> Iterator[Token]:
    """Every piece of running text, links and code spans of a page."""
    for token in tokens(page):
        yield from token.children or ()


# ---- links


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link may name behind #, as GitHub makes it from headings."""
    seen: Counter[str] = Counter()
    found = []
    for before, token in zip(tokens(page), tokens(page)[1:], strict=False):
        if before.type == "heading_open":
            words = "".join(child.content for child in token.children or () if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return frozenset(found)


def links(page: Path) -> list[str]:
    """Targets of links and pictures that are not on the web."""
    hrefs = [
        str(token.attrs.get("href") or token.attrs.get("src"))
        for token in inline(page)
        if token.type in ("link_open", "image")
    ]
    raw = [token.content for token in (*tokens(page), *inline(page)) if token.type.startswith("html")]
    hrefs += [href for text in raw for href in re.findall(r'(?:src|srcset|href)="([^"]+)"', text)]
    return [href for href in hrefs if "://" not in href and not href.startswith("mailto:")]


def followed(page: Path, href: str) -> tuple[Path, str]:
    path, _, anchor = href.partition("#")
    return ((page.parent / path).resolve() if path else page), anchor


@each_page
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page):
    broken = []
    for href in links(page):
        target, anchor = followed(page, href)
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(href)
    assert [] == broken


def test_anchors_are_those_that_github_makes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '# What `x.y` is, and why?\n\n## Again\n\n## Again\n\n[a](b.md#c) ![d](e.png) <img src="f.svg">'
        " [g](https://example.org)\n"
    )
    assert {"what-xy-is-and-why", "again", "again-1"} == anchors(page)
    assert ["b.md#c", "e.png", "f.svg"] == links(page)


def test_every_page_is_reached_from_the_index():
    reached, todo = {INDEX}, [INDEX]
    while todo:
        page = todo.pop()
        found = {followed(page, href)[0] for href in links(page)} & set(DOCS)
        todo += found - reached
        reached |= found
    assert [] == [name_of(page) for page in DOCS if page not in reached]
    assert INDEX in {followed(ROOT / "README.md", href)[0] for href in links(ROOT / "README.md")}


# ---- commands, targets, services and paths that pages name


def statements(block: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell text; a comment, a redirection and the body of a here-document are
    none."""
    end, line = "", ""
    for following in block.replace("\\\n", " ").splitlines():
        if end:
            end = "" if following.strip() == end else end
            continue
        line = f"{line}\n{following}" if line else following.removeprefix("$ ")
        if here := re.search(r"<<-?\s*'?(\w+)'?", line):
            end, line = here[1], line[: here.start()]
        try:
            found = list(_split(re.sub(r"(?<=\s)\d(?=>)", "", line)))
        except ValueError:  # a quotation that goes on in the next line
            continue
        yield from found
        line = ""
    assert not line, f"a quotation without end: {line}"


def _split(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in (*lexer, ";"):
        if word in (">", ">>", ">&", "<", "&>"):
            redirected = True
        elif redirected:
            redirected = False
        elif set(word) <= set("();<>|&"):
            yield _bare(words)
            words = []
        else:
            words.append(word)


def _bare(words: list[str]) -> list[str]:
    """A command without what may stand before its name."""
    while words and (re.match(r"^[A-Za-z_]\w*=", words[0]) or words[0] in ("sudo", "time", "exec")):
        words = words[1:]
    return words


def commands_in(page: Path) -> Iterator[tuple[list[str], bool]]:
    """Every command of a page that is ours to know, and whether it must be whole: in running text a fragment will
    do."""
    ours = re.compile(r"\b(vllm-watch|make|docker compose) ")
    for token in tokens(page):
        shell = token.type == "code_block" or (
            token.type == "fence" and token.info.split(" ")[0] in ("sh", "bash", "shell")
        )
        if shell and ours.search(token.content):
            whole = (
                token.content if token.type == "fence" else "\n".join(filter(ours.search, token.content.splitlines()))
            )
            yield from ((words, True) for words in statements(whole))
    for token in inline(page):
        if (
            token.type == "code_inline"
            and ours.match(token.content)
            and not re.search(r"\||\.\.\.|[<>]", token.content)
        ):
            yield from ((words, False) for words in statements(token.content))


def complaints(words: list[str], whole: bool) -> list[str]:
    """What is wrong with one command of a page."""
    if words[:1] == ["vllm-watch"]:
        return our_command(words[1:], whole)
    if words[:1] == ["make"]:
        return our_target(words[1:], whole)
    if words[:2] == ["docker", "compose"]:
        return our_compose(words[2:], whole)
    return [f"{word}: no such file" for word in words if NAMED.fullmatch(word) and not list(ROOT.glob(word))]


def our_command(words: list[str], whole: bool = True) -> list[str]:
    """The words behind `vllm-watch`, against the real command: its name, its options, what it requires, its choices and
    numbers."""
    command: click.Command = main
    context = click.Context(main, info_name="vllm-watch")
    while isinstance(command, click.Group):
        if command.invoke_without_command and words:  # a group with options of its own, which stand before a command
            try:
                _, words, _ = command.make_parser(context).parse_args(list(words))
            except click.UsageError as error:
                return [f"{context.command_path}: {error.format_message()}"]
            if not words:
                return []
        if not words or words[0].startswith("-"):
            return (
                []
                if not whole or words in (["--version"], ["--help"])
                else [f"vllm-watch {' '.join(words)}: no command"]
            )
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            return [f"{context.command_path} {name}: no such command"]
        command = found.real() if hasattr(found, "real") else found
        context = click.Context(command, info_name=name, parent=context)
    return [f"{context.command_path}: {wrong}" for wrong in _misused(command, context, words, whole)]


def _misused(command: click.Command, context: click.Context, words: list[str], whole: bool) -> list[str]:
    if "--help" in words:
        return []
    try:
        given, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return [error.format_message()] if whole or "No such option" in error.format_message() else []
    wrong = [f"unexpected {rest}"] if rest else []
    for parameter in command.params:
        value = given.get(parameter.name or "")
        if parameter.required and value in (None, (), "") and whole:
            wrong.append(f"{parameter.name} is required")
        if isinstance(
            parameter.type,
            (click.Choice, click.types.IntParamType, click.types.FloatParamType, click.types.FuncParamType),
        ):
            wrong += _unfit(parameter, context, value)
    return wrong


def _unfit(parameter: click.Parameter, context: click.Context, value: Any) -> list[str]:
    """Choices and numbers that click would refuse; a word in capitals stands for one."""
    values = value if isinstance(value, (list, tuple)) else [value]
    wrong = []
    for each in values:
        if isinstance(each, str) and not re.fullmatch(r"[A-Z_]+|\$.*", each):
            try:
                parameter.type.convert(each, parameter, context)
            except click.ClickException as error:
                wrong.append(error.format_message())
    return wrong


TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def our_target(words: list[str], whole: bool = True) -> list[str]:
    """The words behind `make`, and behind ARGS those of the command that the target runs."""
    given = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    targets = [word for word in words if "=" not in word and not word.startswith("-")]
    wrong = [
        f"make {target}: no such target"
        for target in targets
        if not any(re.fullmatch(target.replace("*", ".*"), known) for known in TARGETS)
    ]
    runs = {"cli": [], "lab": ["lab", "up"]}
    for target in targets:
        if target in runs and (arguments := runs[target] + shlex.split(given.get("ARGS", ""))):
            wrong += our_command(arguments, whole)
    return wrong


@cache
def services(files: tuple[str, ...]) -> frozenset[str]:
    found: set[str] = set()
    for file in files:
        found |= set(
            re.findall(
                r"^  ([a-z][a-z-]*):$",
                (ROOT / file).read_text().split("\nservices:\n")[1].split("\nvolumes:\n")[0],
                re.MULTILINE,
            )
        )
    return frozenset(found)


def our_compose(words: list[str], whole: bool = True) -> list[str]:
    """The words behind `docker compose`: its files, services, and what a service of ours is told to run."""
    files, rest = [], list(words)
    while rest[:1] and rest[0].startswith("-"):
        option = rest.pop(0)
        value = rest.pop(0) if option in TAKES_VALUE else ""
        files += [value] if option == "-f" else []
    missing = [file for file in files if file.startswith(("docker-compose", "stack/")) and not (ROOT / file).is_file()]
    if missing or not rest or any(not (ROOT / file).is_file() for file in files):
        return [f"{file}: no such file" for file in missing]
    known, verb = services(("docker-compose.yml", *files)), rest.pop(0)
    told, entrypoint = _services_told(rest, verb in ("run", "exec")), "--entrypoint" in rest
    wrong = [
        f"docker compose {verb} {name}: no such service"
        for name in told[: 1 if verb in ("run", "exec") else None]
        if name not in known
    ]
    if verb == "run" and told[:1] == ["cli"] and not entrypoint:
        wrong += our_command(told[1:], whole)
    if verb == "exec" and told[1:2] == ["vllm-watch"]:
        wrong += our_command(told[2:], whole)
    return wrong


def _services_told(words: list[str], one: bool) -> list[str]:
    """Words that are no option of the verb; one: behind the first of them everything belongs to it."""
    told: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            rest = rest[1:] if word in TAKES_VALUE else rest
        elif one:
            return [word, *rest]
        else:
            told.append(word)
    return told


@each_page
def test_commands_options_targets_and_services_exist(page):
    """Every command option target and service that a page shows exists."""
    wrong = [f"{' '.join(words)}: {what}" for words, whole in commands_in(page) for what in complaints(words, whole)]
    assert [] == wrong


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("vllm-watch alert list", "no such command"),
        ("vllm-watch alerts export --uot rules", "No such option"),
        ("vllm-watch alerts export", "is required"),
        ("vllm-watch cost --by tem", "not 'tem'"),
        ("make cli ARGS='metrics lst'", "no such command"),
        ("make bench-nothing", "no such target"),
        ("docker compose run --rm cli secret", "no such command"),
        ("docker compose kill -s HUP gatway", "no such service"),
        ("docker compose -f stack/deploy/compose.gpu.yml up", "no such file"),
        ("id=$(vllm-watch annotate --opne) # x", "No such option"),
        ("python tests/bench_nothing.py", "no such file"),
    ],
)
def test_a_command_that_is_wrong_would_be_found(line, what):
    assert what in str([wrong for words in statements(line) for wrong in complaints(words, True)])


@each_page
def test_no_page_sends_a_signal_by_docker(page):
    """Docker takes any for a wish to stop, and starts the container neither after a crash nor after a reboot
    (moby/moby#41302)."""
    assert "docker compose kill" not in page.read_text().replace("Do not use `docker compose kill -s HUP`", "")


@each_page
def test_every_path_in_backticks_exists(page):
    spans = [
        span
        for token in inline(page)
        if token.type == "code_inline"
        for span in token.content.split()
        if NAMED.fullmatch(span)
    ]
    assert [] == [span for span in spans if not any(ROOT.glob(one) for one in _braces(span.rstrip("/").split("::")[0]))]


def _braces(span: str) -> list[str]:
    """a/{b,c} as the shell would write it out."""
    found = re.search(r"\{([^{}]*)\}", span)
    return [span.replace(found[0], one) for one in found[1].split(",")] if found else [span]


# ---- examples


@dataclass
class Example:
    """A marked block: a shell text that is run, what it prints, or a file that it reads."""

    mark: str
    about: str
    text: str
    printed: str | None = field(default=None)


def examples(page: Path) -> list[Example]:
    """The marked blocks of a page; an output belongs to the run before it."""
    found: list[Example] = []
    mark = None
    for token in tokens(page):
        if token.type == "html_block":
            mark = re.fullmatch(r"<!-- (run|output|file)(?:: (.*))? -->", token.content.strip())
        elif token.type in ("fence", "code_block") and mark:
            if mark[1] == "output":
                assert found, f"{name_of(page)}: an output before anything ran"
                assert "run" == found[-1].mark, f"{name_of(page)}: an output of nothing that ran"
                found[-1].printed = token.content
            else:
                found.append(Example(mark[1], mark[2] or "", token.content))
            mark = None
    return found


def kind_of(example: Example) -> str:
    """`NAME as KIND`, or the name itself where a reader goes by it."""
    return example.about.split(" as ")[-1].split("/")[-1]


MARKED = [page for page in PAGES if re.search(r"^ *<!-- (run|file)\b", page.read_text(), re.MULTILINE)]


def like(expected: str) -> re.Pattern[str]:
    """Text with `...` for what may be anything."""
    lines = []
    for line in expected.rstrip("\n").split("\n"):
        whole = line.strip() == "..."
        lines.append(r"(?:.*\n)*?" if whole else re.escape(line.rstrip()).replace(r"\.\.\.", ".*") + r"[ ]*\n")
    return re.compile("".join(lines))


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """A folder like a checkout, to which an example may write: what is tracked is there as links, `vllm-watch` is the
    command from the tree."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / ".bin").mkdir()
    command = tmp_path / ".bin/vllm-watch"
    command.write_text(
        # bash sets COLUMNS to 80 where there is no terminal
        "#!/bin/sh\nunset COLUMNS\n"
        f'PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m stack.cli "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/.bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("VLLM_WATCH_EVENTS", "VLLM_WATCH_CACHE", "XDG_CACHE_HOME", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("page", MARKED, ids=name_of)
def test_the_examples_of_a_page_run_and_print_what_it_shows(page, desk):
    for example in examples(page):
        if example.mark == "file":
            path = desk / example.about.split(" as ")[0]
            assert not (desk / path.relative_to(desk).parts[0]).is_symlink(), (
                f"{path.name} would be written into the checkout"
            )
            path.write_text(example.text)
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", example.text],
            cwd=desk,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        expected = int(example.about.removeprefix("exit ") or 0)
        assert expected == done.returncode, f"{example.text}\n{done.stdout}{done.stderr}"
        if example.printed is not None:
            told = f"{example.text}\nprinted:\n{done.stdout}{done.stderr}\nthe page says:\n{example.printed}"
            assert like(example.printed).fullmatch(done.stdout), told


FILES = [
    (page, example)
    for page in MARKED
    for example in examples(page)
    if example.mark == "file" and kind_of(example) in KINDS
]


@pytest.mark.parametrize(
    ("page", "example"), FILES, ids=[f"{name_of(page)} {kind_of(example)}" for page, example in FILES]
)
def test_documented_configuration_is_readable(page, example, tmp_path):
    """Configuration files of the pages are read by our own readers."""
    path = tmp_path / example.about.split(" as ")[0]
    path.write_text(example.text)
    for other in examples(page):  # a file may name another one of its page
        if other.mark == "file" and other is not example:
            (tmp_path / other.about.split(" as ")[0]).write_text(other.text)
    KINDS[kind_of(example)](path)


@each_page
def test_every_yaml_block_is_yaml(page):
    for token in tokens(page):
        if token.type == "fence" and token.info.strip() in ("yaml", "yml"):
            list(yaml.safe_load_all(token.content))


def test_three_dots_stand_for_anything_and_nothing_else_does():
    assert like("a ... b\n...\nc\n").fullmatch("a 12.5 b\n1\n2\nc\n")
    assert like("...\nc\n").fullmatch("c\n")
    assert not like("a.b\n").fullmatch("axb\n")
    assert not like("a\n").fullmatch("a\nb\n")


# ---- test status


def slug_of(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def status_tables() -> dict[str, list[tuple[str, str, str]]]:
    """Rows (claim, grade, test) of the page Test status, by the anchor of their heading."""
    found = {}
    for section in re.split(r"^### ", STATUS.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        body = re.split(r"^## ", body, maxsplit=1, flags=re.MULTILINE)[0]
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            for line in body.splitlines()
            if line.startswith("|")
        ]
        found[slug_of(title)] = [(claim, grade.strip("*"), where) for claim, grade, where in rows[2:]]
    return found


@each_doc
def test_every_page_links_to_its_test_status(page):
    links_to = re.findall(r"^Test status: \[[^\]]+\]\(([^)#]+)#([^)]+)\)\.$", page.read_text(), re.MULTILINE)
    assert 1 == len(links_to), f"{name_of(page)} has no line 'Test status: [...](...)'"
    ((path, anchor),) = links_to
    assert STATUS == (page.parent / path).resolve()
    assert anchor in status_tables()


@pytest.mark.parametrize("anchor", status_tables())
def test_test_status_uses_the_five_grades_and_names_tests(anchor):
    rows = status_tables()[anchor]
    assert rows, f"no table under {anchor}"
    assert set() == {grade for _, grade, _ in rows} - GRADES
    for claim, grade, where in rows:
        assert grade == "not tested" or where, claim
    named = [span for *_, where in rows for span in re.findall(r"`([^`]+)`", where)]
    assert [] == [span for span in named if NAMED.fullmatch(span) and not list(ROOT.glob(span.split("::")[0]))]


# ---- figures that stand on several pages


def rules_in(name: str) -> list[str]:
    groups = yaml.safe_load((ROOT / f"alerts/prometheus/{name}.yaml").read_text())["groups"]
    return [rule.get("alert") or rule["record"] for group in groups for rule in group["rules"]]


FIGURES = {
    r"\b(\d+) alerts\b(?! have)": len(ALERTS),
    r"\b(\d+) alerts have a drill": len(DRILLS),
    r"\b(\d+) boards\b": len(BOARDS),
    r"\b(\d+) commands\b": len(COMMANDS),
    r"\b(\d+) workloads\b": sum(len(workload_file.load(path).workloads) for path in workload_file.included().values()),
    r"\b(\d+) recorded series\b": len(rules_in("recording")),
    r"\blinter of (\d+) rules\b": len(RULES),
    r"`page\.yaml` \((\d+)\)": len(rules_in("page")),
    r"`ticket\.yaml` \((\d+)\)": len(rules_in("ticket")),
    r"`info\.yaml` \((\d+)\)": len(rules_in("info")),
}


def test_dashboard_table_is_complete():
    """The table of boards has every board with its own question."""
    rows = dict(
        re.findall(
            r"^\| (.+?) \| (.+?) \|$", (ROOT / "docs/guides/dashboards.md").read_text().split("\n\n")[1], re.MULTILINE
        )
    )
    asked = {board.title.removeprefix("vLLM / "): board.question for board in BOARDS}
    assert [] == [title for title, question in asked.items() if not rows.get(title, "").startswith(question)]
    assert set(asked) == set(rows) - {"dashboard"}


COUNTED = [
    ROOT / "README.md",
    INDEX,
    ROOT / "docs/internals/architecture.md",
    *sorted((ROOT / "docs/start").glob("*.md")),
]


@pytest.mark.parametrize("page", COUNTED, ids=name_of)
def test_figures_of_the_front_pages_are_those_of_the_code(page):
    text = " ".join(page.read_text().split())
    assert [] == [
        f"{found} (is {real}): {pattern}"
        for pattern, real in FIGURES.items()
        for found in re.findall(pattern, text)
        if int(found) != real
    ]


def test_port_table_is_complete():
    """The table of ports has every port of the lab and of compose."""
    table = (ROOT / "docs/internals/architecture.md").read_text().split("\n## Ports\n")[1].split("\n## ")[0]
    told = {int(port) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for port in row.split(", ")}
    published = set(
        map(
            int, re.findall(r"127\.0\.0\.1:\$\{VLLM_WATCH_PORT_\w+:-(\d+)\}", (ROOT / "docker-compose.yml").read_text())
        )
    )
    assert published, "compose publishes none, or writes them otherwise"
    assert told == published | set(PORTS.values())

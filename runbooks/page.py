"""Runbook pages: read, fill with labels, print the generated parts. They travel in the package, so they can be read
when nothing else answers.

Invariant: the value of a label is foreign text. `fill` puts it into a page so that neither Prometheus, a shell nor a
terminal can take it for anything but a word, or leaves it out."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alerts.registry import ALERTS
from alerts.rules import Alert
from exporters.text import escaped_letter, markdown_table
from runbooks.diagnosis.row import DiagnosisRow

FOLDER = Path(__file__).resolve().parent
HEADINGS = (
    "Do this first",
    "Meaning",
    "Impact",
    "First five minutes",
    "Diagnosis",
    "Mitigation",
    "Escalation",
    "Rule and threshold",
)
SEVERITIES = ("critical", "warning", "info", "none")
KEYS = ("related", "reviewed")  # of the front matter; what the alert says is not repeated there
# printed parts, and the section that each stands in
REGIONS = {"diagnosis": "Diagnosis", "rule": "Rule and threshold", "threshold": "Rule and threshold"}

_ALERTS = {alert.name: alert for alert in ALERTS}
_FRONT = re.compile(r"---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n?", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"\s*```\s*(\w*)")
_NUMBERED = re.compile(r"(\d+)\. +(.*)")
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")
MITIGATION = re.compile(r"Mitigations? (\d+(?:(?:,? (?:and|or|then) |, ?)\d+)*)")
PLACEHOLDER = re.compile(r'(=~\s*")?\{\{\s*(\w+)\s*\}\}("?)')


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code without its indentation."""

    language: str
    text: str


@dataclass(frozen=True, slots=True)
class RunbookStep:
    """One of a numbered list. text: what stands before its first block."""

    number: int
    text: str
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class RunbookSection:
    """Section of a page's body: without comments."""

    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class RunbookPage:
    """A page as it was written. about: its front matter, empty where there is none or it cannot be read; wrong: why it
    cannot."""

    name: str
    text: str
    about: Mapping[str, Any]
    wrong: str
    title: str
    sections: tuple[RunbookSection, ...]

    @property
    def is_alert(self) -> bool:
        return self.name.startswith("VLLM")

    @property
    def alert(self) -> Alert | None:
        """The alert that this page is for."""
        return _ALERTS.get(self.name)

    @property
    def severity(self) -> str:
        return self.alert.labels["severity"] if self.alert else ""

    @property
    def related(self) -> tuple[str, ...]:
        named = self.about.get("related")
        return tuple(map(str, named)) if isinstance(named, list) else ()

    @property
    def body(self) -> str:
        """Return the readable text: without front matter and comments."""
        return _COMMENT.sub("", _split(self.text)[1]).strip() + "\n"

    @property
    def gist(self) -> str:
        """The first sentence of the meaning, or of a page without one."""
        paragraphs = re.split(r"\n\s*\n", self.section("Meaning") or self.body)
        prose = next(
            (" ".join(one.split()) for one in paragraphs if not one.lstrip().startswith(("#", "|", "```"))), ""
        )
        sentence = re.match(r".+?\.(?=\s+[A-Z]|$)", prose)
        return sentence[0] if sentence else prose

    def section(self, heading: str) -> str:
        return next((section.text for section in self.sections if section.heading == heading), "")

    def readable(self, heading: str = "") -> str:
        """Return the body, or one section of it, with each row of the diagnosis followed by its condition."""
        rows = _listed(self.rows)
        shown = parse(self.name, _printed(self.text, "diagnosis", rows.rstrip())) if rows else self
        return f"## {heading}\n\n{shown.section(heading)}\n" if heading else shown.body

    @property
    def first(self) -> tuple[RunbookStep, ...]:
        """The box at the top: what to do before any query."""
        return tuple(_steps(self.section("Do this first")))

    @property
    def steps(self) -> tuple[RunbookStep, ...]:
        return tuple(_steps(self.section("First five minutes")))

    @property
    def rows(self) -> tuple[DiagnosisRow, ...]:
        return tuple(_rows(self.section("Diagnosis")))

    @property
    def mitigations(self) -> tuple[RunbookStep, ...]:
        return tuple(_steps(self.section("Mitigation")))

    def filled(self, labels: Mapping[str, str]) -> RunbookPage:
        """Return the page with the labels of an alert in its commands and queries; see `fill`."""
        return parse(self.name, fill(self.text, labels))


# ---- reading


def names(folder: Path = FOLDER) -> list[str]:
    """The alerts that have a page."""
    return sorted(page.stem for page in folder.glob("VLLM*.md"))


def text(name: str, folder: Path = FOLDER) -> str | None:
    """A page as Markdown; None when there is none. Any other name than that of a page finds nothing."""
    return (
        (folder / f"{name}.md").read_text(encoding="utf-8")
        if name in {page.stem for page in folder.glob("*.md")}
        else None
    )


def pages(folder: Path = FOLDER) -> tuple[RunbookPage, ...]:
    """Return the pages of alerts, then the others."""
    files = sorted(folder.glob("*.md"), key=lambda file: (not file.stem.startswith("VLLM"), file.stem))
    return tuple(parse(file.stem, file.read_text(encoding="utf-8")) for file in files)


def parse(name: str, text: str) -> RunbookPage:
    """Never fails: what is not there is empty, and `faults` says so."""
    front, body = _split(text)
    about, wrong = _about(front)
    title, sections = "", []
    for line, language in walk(_COMMENT.sub("", body)):
        if language is None and line.startswith("## "):
            sections.append((line[3:].strip(), list[str]()))
        elif sections:
            sections[-1][1].append(line)
        elif line.startswith("# ") and not title:
            title = line[2:].strip()
    return RunbookPage(
        name,
        text,
        about,
        wrong,
        title,
        tuple(RunbookSection(heading, "\n".join(lines).strip()) for heading, lines in sections),
    )


def _split(text: str) -> tuple[str, str]:
    """Front matter and the rest."""
    found = _FRONT.match(text)
    return (found[1], text[found.end() :]) if found else ("", text)


def _about(front: str) -> tuple[Mapping[str, Any], str]:
    if not front:
        return {}, "has no front matter"
    try:
        read = yaml.safe_load(front)
    except yaml.YAMLError as error:
        return {}, f"has front matter that is no YAML ({' '.join(str(error).split())})"
    return (read, "") if isinstance(read, dict) else ({}, "has front matter without keys")


def walk(text: str) -> Iterator[tuple[str, str | None]]:
    """Each line, and the language of the block of code that it is in: None outside, as for the fences themselves."""
    inside: str | None = None
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if fence:
            yield line, None
            inside = None if inside is not None else fence[1]
        else:
            yield line, inside


def _steps(section: str) -> Iterator[RunbookStep]:
    """A numbered list; what is indented below a number belongs to it."""
    number, prose, blocks, code, written_in = 0, list[str](), list[Block](), list[str](), ""
    for line, language in walk(section):
        found = _NUMBERED.match(line) if language is None else None
        if found:
            if number:
                yield RunbookStep(number, " ".join(prose), tuple(blocks))
            number, prose, blocks = int(found[1]), [found[2].strip()], []
        elif language is not None:
            code.append(line)
            written_in = language
        elif code:  # the fence that ends it
            blocks.append(Block(written_in, textwrap.dedent("\n".join(code)).strip()))
            code = []
        elif line.strip() and not blocks and not _FENCE.match(line):
            prose.append(line.strip())
    if number:
        yield RunbookStep(number, " ".join(prose), tuple(blocks))


def _rows(section: str) -> Iterator[DiagnosisRow]:
    """Yield the rows of the first table, each with its condition: the query of the same number in the list below."""
    table = [_cells(line) for line, language in walk(section) if language is None and line.startswith("|")]
    conditions = {step.number: step.blocks[0].text for step in _steps(section) if step.blocks}
    for cells in table[2:]:
        by_title = dict(zip(table[0], cells, strict=False))
        number = by_title.get("Row", "")
        condition = conditions.get(int(number), "") if number.isdecimal() else ""
        what, cause, go_to = (by_title.get(title, "") for title in _COLUMNS[1:])
        yield DiagnosisRow(what, condition, cause, go_to)


def _listed(rows: Iterable[DiagnosisRow]) -> str:
    blocks = ((row, f"\n\n  ```promql\n  {row.condition}\n  ```" if row.condition else "") for row in rows)
    return "".join(f"- {row.what}: {row.cause}. Go to {row.go_to}.{block}\n" for row, block in blocks)


def _cells(line: str) -> list[str]:
    inner = re.sub(r"^\||(?<!\\)\|$", "", line.strip())
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


# ---- filling


def fill(text: str, labels: Mapping[str, str]) -> str:
    """A page with `{{name}}` replaced by the value of that label.

    In PromQL a placeholder stands as `=~"{{name}}"` and gets a regular expression that matches just this value; `.*`
    where there is no such label. Elsewhere it gets the value as it is when that is plain, quoted where a shell reads it
    and needs that, and else the name of the
    label in capitals: also for an unknown one, and where quoting could not be trusted."""
    lines, before = [], ""
    for line, language in walk(text):
        lines.append(_filled(line, language, before, labels))
        before = "" if language is None else f"{before}{line}\n"  # of the block that this line is in
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def placeholders(text: str) -> list[str]:
    """The labels that a page asks for, in order."""
    return list(dict.fromkeys(found[2] for found in PLACEHOLDER.finditer(text)))


def _filled(line: str, language: str | None, before: str, labels: Mapping[str, str]) -> str:
    in_table = language is None and line.startswith("|")

    def value(found: re.Match[str]) -> str:
        opening, name, closing = found[1] or "", found[2], found[3]
        given = labels.get(name, "")
        if opening and closing and (in_table or language == "promql"):
            pattern = _exactly(given) if given else ".*"
            return opening + (pattern.replace("|", "\\|") if in_table else pattern) + closing
        quotable = language == "bash" and _quotable(given) and _bare(before + line[: found.start() + len(opening)])
        plain = _plain(given) or (shlex.quote(given) if quotable else "")
        return opening + (plain or name.upper()) + closing

    return PLACEHOLDER.sub(value, line)


def _exactly(value: str) -> str:
    """A regular expression for this value alone, inside a PromQL string in double quotes. A backtick would end a span
    of code in Markdown."""
    pattern = re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", value)
    return "".join(
        f"\\{c}" if c in '\\"' else c if c.isprintable() and c != "`" else escaped_letter(c) for c in pattern
    )


def _plain(value: str) -> str:
    """The value if it is one word to every shell, inside quotes and outside, and no option."""
    return value if re.fullmatch(r"[A-Za-z0-9._/][A-Za-z0-9._/:@%+,=-]*", value) else ""


def _quotable(value: str) -> bool:
    return bool(value) and value.isprintable() and not value.startswith("-") and "`" not in value


_WHOLE = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<!\S)#[^\n]*\n""", re.DOTALL)
_UNTRUSTED = re.compile(r"""\$[({'"]|`|<<|\b(?:eval|ssh|sh|bash|su|watch|xargs)\b""")


def _bare(before: str) -> bool:
    """Return whether a shell that has read this takes what comes next as plain words, and once. False in doubt: where
    quotes may nest, in a here-document, and where one shell hands its words to another."""
    rest = _WHOLE.sub("", before)
    return not _UNTRUSTED.search(before) and "'" not in rest and '"' not in rest and "#" not in rest


# ---- printing


@dataclass(frozen=True, slots=True)
class Facts:
    """Printed parts of a page, from its alert. hold: how long expr must hold; threshold: paragraphs;
    rows: of the diagnosis."""

    expr: str
    hold: str
    threshold: tuple[str, ...]
    rows: tuple[DiagnosisRow, ...] = ()


def stamped(text: str, facts: Facts) -> str:
    """The page with its printed parts as the alert is now; the rest stays. Stamped again it stays the same."""
    holds = (
        "as soon as this expression returns a result"
        if facts.hold.strip("0") in ("s", "m")
        else f"when this expression has returned a result for {facts.hold}"
    )
    body = _printed(text, "rule", f"The alert fires {holds}:\n\n```promql\n{facts.expr}\n```")
    body = _printed(body, "diagnosis", _diagnosis(facts.rows))
    return _printed(body, "threshold", "\n\n".join(facts.threshold))


_COLUMNS = ("Row", "What you see", "Likely cause", "Go to")


def _diagnosis(rows: Sequence[DiagnosisRow]) -> str:
    """Return the table of a diagnosis, and below it the condition of each row: no column is wide enough for a query."""
    numbered = [(number, row.what, row.cause, row.go_to) for number, row in enumerate(rows, 1)]
    conditions = [
        f"{number}. {row.what}:\n\n   ```promql\n   {row.condition}\n   ```" for number, row in enumerate(rows, 1)
    ]
    intro = "Conditions. Each returns a result exactly when its row applies:"
    return "\n".join([*markdown_table(_COLUMNS, numbered), "", intro, "", *conditions])


def _printed(body: str, region: str, content: str) -> str:
    return printed_region(region).sub(lambda found: f"{found[1]}{content}\n{found[2]}", body)


def printed_region(name: str) -> re.Pattern[str]:
    return re.compile(rf"^(<!-- printed: {name} -->\n)(?:(?!<!--).)*?^(<!-- end -->)$", re.DOTALL | re.MULTILINE)

"""Language of source text and documentation: replaced words, docstring openers, line length.

docs/glossary.md is the source of the replaced words. Metric names, options and quotations that must keep a word are
listed in EXCEPTIONS with their reason."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("exporters", "alerts", "dashboards", "runbooks", "stack", "vllm_watch", "tools")
GLOSSARY = (ROOT / "docs/glossary.md").read_text().split("## Replaced words")[1]
REPLACED = {
    word: (re.compile(rf"(?<![\w/-])(?:{pattern})(?![\w-])".replace(r"\|", "|"), re.IGNORECASE), use)
    for word, pattern, use in re.findall(r"^\| ([^|]+?) \| `((?:[^`])+)` \| (.+?) \|$", GLOSSARY, re.MULTILINE)
}
ANY_REPLACED = re.compile("|".join(f"(?:{pattern.pattern})" for pattern, _ in REPLACED.values()), re.IGNORECASE)
HEADLESS = re.compile(r"^(What|Who|Whose|Whom|How|Whether|Where|When|Why|Of|The same|Those|One that|That|As)\b")
COLUMNS = 120

# Path -> words that stay there, with the reason.
EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "exporters/catalogue/promql_ast.py": ("card",),  # attribute of promql_parser's VectorMatchModifier
    "dashboards/grafana_json.py": ("card",),  # fields of Grafana's heatmaps
    "dashboards/lint_dashboards.py": ("card",),  # fields of Grafana's heatmaps
    "docs/guides/capacity-live.md": ("law",),  # Little's law
    "docs/guides/tuning.md": ("arm",),  # a key of experiment files
    "stack/bench/prompts.py": ("told, tells",),  # the text that prompts are made of
    "stack/bench/result.py": ("arm",),  # fields of bench.json and of experiment files
}


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository that fit one of the patterns; untracked ones that are not ignored as well."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


SOURCES = [path for path in tracked("*.py") if path.relative_to(ROOT).parts[0] in PACKAGES]
DOCUMENTS = [path for path in tracked("*.md") if path.name not in ("CHANGELOG.md", "glossary.md")]
name_of = lambda path: path.relative_to(ROOT).as_posix()  # noqa: E731


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of each comment, string and name of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, tokenize.NAME, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], token.string


def replaced_words(path: Path) -> list[str]:
    """Replaced words in a file, as `line: word (use)`. Code spans and links of Markdown are not prose."""
    kept = EXCEPTIONS.get(name_of(path), ())
    if path.suffix == ".py":
        pieces = list(texts(path))
    else:
        prose = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.DOTALL)
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
        pieces = list(enumerate(prose.splitlines(), 1))
    anything = "\n".join(text for _, text in pieces)
    return [
        f"{line}: {found[0]} (use: {use})"
        for line, text in (pieces if ANY_REPLACED.search(anything) else ())
        for word, (pattern, use) in REPLACED.items()
        if word not in kept
        for found in pattern.finditer(text)
    ]


def test_the_glossary_lists_replaced_words():
    assert len(REPLACED) >= 15
    assert REPLACED["card"][0].search("two cards")
    assert not REPLACED["card"][0].search("a discard")


def headless_docstrings(path: Path) -> list[str]:
    """First lines of docstrings that start with no verb and no noun phrase."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return [text.splitlines()[0] for text in found if text and HEADLESS.match(text)]


def test_sources_use_no_replaced_word_and_start_docstrings_well():
    faults = {name_of(path): replaced_words(path) + headless_docstrings(path) for path in SOURCES}
    assert {} == {name: found for name, found in faults.items() if found}


def test_documents_use_no_replaced_word():
    faults = {name_of(path): replaced_words(path) for path in DOCUMENTS}
    assert {} == {name: found for name, found in faults.items() if found}


def test_every_exception_is_needed_and_they_are_few():
    assert sum(map(len, EXCEPTIONS.values())) <= 20
    unknown = [(path, word) for path, words in EXCEPTIONS.items() for word in words if word not in REPLACED]
    assert [] == unknown
    for path, words in EXCEPTIONS.items():
        text = (ROOT / path).read_text()
        assert [] == [word for word in words if not REPLACED[word][0].search(text)], path


WRAPPED = [path for path in DOCUMENTS if not name_of(path).startswith(("runbooks/", "tests/", "docs/reference/"))]


def test_prose_is_at_most_120_columns():
    """Tables, code, and lines of one code span cannot be wrapped."""
    found = []
    for path in WRAPPED:
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        long = [
            line for line in prose.splitlines() if len(line) > COLUMNS and not line.lstrip().startswith(("|", "!["))
        ]
        found += [
            (name_of(path), line) for line in long if not line.startswith(("    ", "`")) and "`" not in line[COLUMNS:]
        ]
    assert [] == found

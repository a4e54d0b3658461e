"""Count the tests that compare sentences: a better wording should break the recorded outputs only, never a test.

A sentence is a literal of four words or more in a row. A test compares one if it stands in the condition of an `assert`
or in a `match=`, directly or behind a name: of a parameter, of a local variable, of a loop over a table or of a
constant of the file. An f-string counts as one literal. The message of an `assert` is not compared. Run in the root:
`python -m tests.lint.sentences [-v]`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# Tests that may compare one.
LIMIT = 120
WORD = r"[A-Za-z][A-Za-z'-]*"
SENTENCE = re.compile(rf"(?<![\w./-]){WORD}(?:[,;:.]?\s+{WORD}){{3}}(?!\w)")
Test = ast.FunctionDef | ast.AsyncFunctionDef
Names = dict[str, list[str]]


def literals(node: ast.AST, names: Names) -> Iterator[str]:
    """Yield the text literals below a node, and those that its names stand for."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        yield node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
    elif isinstance(node, ast.Name):
        yield from names.get(node.id, ())
    else:
        for child in ast.iter_child_nodes(node):
            yield from literals(child, names)


def rows_of(node: ast.expr, tables: Mapping[str, ast.expr]) -> list[ast.expr]:
    """Return the rows of a table: of a literal, or of a constant of the file. Of a dict, the pairs."""
    node = tables.get(node.id, node) if isinstance(node, ast.Name) else node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        inner = tables.get(node.func.value.id)
        if isinstance(inner, ast.Dict):
            kinds: dict[str, list[ast.expr]] = {
                "items": [ast.Tuple([key, value]) for key, value in zip(inner.keys, inner.values, strict=True) if key],
                "keys": [key for key in inner.keys if key],
                "values": list(inner.values),
            }
            return kinds.get(node.func.attr, [])
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key]
    return list(node.elts) if isinstance(node, ast.List | ast.Tuple | ast.Set) else []


def by_column(columns: list[str], rows: list[ast.expr]) -> Names:
    """Return the text literals of each column of a table."""
    names: Names = {}
    for row in rows:
        cells = row.args if isinstance(row, ast.Call) else [row]
        cells = list(row.elts) if isinstance(row, ast.Tuple | ast.List) and len(columns) > 1 else cells
        for column, cell in zip(columns, cells, strict=False):
            names.setdefault(column, []).extend(literals(cell, {}))
    return names


def assigned(body: Iterable[ast.AST], tables: Mapping[str, ast.expr]) -> Names:
    """Return the text literals that names stand for: assigned, or taken from a table by a loop. A call's arguments are
    input, and left out."""
    names: Names = {}
    for node in body:
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, []).extend(literals(node.value, {}))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            target = node.target
            columns = (
                [ast.unparse(one) for one in target.elts] if isinstance(target, ast.Tuple) else [ast.unparse(target)]
            )
            for column, texts in by_column(columns, rows_of(node.iter, tables)).items():
                names.setdefault(column, []).extend(texts)
    return names


def parameters(test: Test, tables: Mapping[str, ast.expr]) -> Names:
    """Return the text literals that `parametrize` gives to each name of a test."""
    names: Names = {}
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
            given = [*decorator.args, *(each.value for each in decorator.keywords if each.arg == "argvalues")]
            columns = [name.strip() for text in literals(given[0], {}) for name in text.split(",")]
            names |= by_column(columns, rows_of(given[1], tables))
    return names


def unescaped(pattern: str) -> str:
    """Return the plain text of a regular expression; `|` stands for what matches more than one text."""
    return re.sub(r"\\([^\w])", r"\1", re.sub(r"\.[*+]\??|\[[^]]*\][*+]?", "|", re.sub(r"\\s[*+]?", " ", pattern)))


def sentences(test: Test, constants: Names, tables: Mapping[str, ast.expr]) -> list[str]:
    """Return the sentences that a test compares."""
    names = constants | assigned(ast.walk(test), tables) | parameters(test, tables)
    texts = []
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            texts += [text for text in literals(node.test, names) if SENTENCE.search(text)]
        elif isinstance(node, ast.keyword) and node.arg == "match":
            texts += [text for text in literals(node.value, names) if SENTENCE.search(unescaped(text))]
    return texts


def comparing(root: Path) -> dict[str, list[str]]:
    """Return the sentences of each test below tests/ that compares one, by file and name."""
    tests = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        tables = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        constants = assigned(tree.body, tables)
        for test in ast.walk(tree):
            if not isinstance(test, Test) or not test.name.startswith("test_"):
                continue
            if texts := sentences(test, constants, tables):
                tests[f"{path.relative_to(root)}::{test.name}"] = texts
    return tests


def main() -> int:
    tests = comparing(Path.cwd())
    if "-v" in sys.argv:
        for name, texts in tests.items():
            print(name, *(f"    {text!r}" for text in texts), sep="\n")
    print(f"{len(tests)} tests compare sentences; at most {LIMIT} may")
    return len(tests) > LIMIT


if __name__ == "__main__":
    sys.exit(main())

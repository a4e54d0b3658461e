"""Count the tests that compare sentences: a better wording should break the recorded outputs only, never a test.

A sentence is a literal of four words or more in a row. A test compares one if it stands in the condition of an `assert`
or in a `match=`, directly or behind a name: of a parameter, of a local variable or of a constant of the file. An
f-string counts as one literal. The message of an `assert` is not compared. Run in the root:
`python -m tests.lint.sentences [-v]`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Tests that may compare one.
LIMIT = 80
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


def assigned(body: list[ast.stmt]) -> Names:
    """Return the text literals that are assigned to each name. A call's arguments are input, and left out."""
    names: Names = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(
            statement.value, ast.Constant | ast.JoinedStr | ast.Tuple | ast.List | ast.BinOp
        ):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, []).extend(literals(statement.value, {}))
    return names


def parameters(test: Test) -> Names:
    """Return the text literals that `parametrize` gives to each name of a test."""
    names: Names = {}
    for decorator in test.decorator_list:
        if (
            isinstance(decorator, ast.Call)
            and ast.unparse(decorator.func).endswith("parametrize")
            and len(decorator.args) >= 2
        ):
            keys, rows = decorator.args[:2]
            columns = [name.strip() for text in literals(keys, {}) for name in text.split(",")]
            for row in rows.elts if isinstance(rows, ast.List | ast.Tuple) else ():
                cells = (
                    row.args
                    if isinstance(row, ast.Call)
                    else row.elts
                    if isinstance(row, ast.Tuple) and len(columns) > 1
                    else [row]
                )
                for column, cell in zip(columns, cells, strict=False):
                    names.setdefault(column, []).extend(literals(cell, {}))
    return names


def unescaped(pattern: str) -> str:
    """Return the plain text of a regular expression; `|` stands for what matches more than one text."""
    return re.sub(r"\\([^\w])", r"\1", re.sub(r"\.[*+]\??|\[[^]]*\][*+]?", "|", re.sub(r"\\s[*+]?", " ", pattern)))


def sentences(test: Test, constants: Names) -> list[str]:
    """Return the sentences that a test compares."""
    names = constants | assigned([node for node in ast.walk(test) if isinstance(node, ast.stmt)]) | parameters(test)
    found = []
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            found += [text for text in literals(node.test, names) if SENTENCE.search(text)]
        elif isinstance(node, ast.keyword) and node.arg == "match":
            found += [text for text in literals(node.value, names) if SENTENCE.search(unescaped(text))]
    return found


def comparing(root: Path) -> dict[str, list[str]]:
    """Return the sentences of each test below tests/ that compares one, by file and name."""
    tests = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        constants = assigned(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, Test) and node.name.startswith("test_") and (found := sentences(node, constants)):
                tests[f"{path.relative_to(root)}::{node.name}"] = found
    return tests


def main() -> int:
    tests = comparing(Path.cwd())
    if "-v" in sys.argv:
        for name, found in tests.items():
            print(name, *(f"    {text!r}" for text in found), sep="\n")
    print(f"{len(tests)} tests compare sentences; at most {LIMIT} may")
    return len(tests) > LIMIT


if __name__ == "__main__":
    sys.exit(main())

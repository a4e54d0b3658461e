"""Size of each package in Python tokens, beside its limit: lines change with the formatter, tokens do not.

A token is a Python token without comments, newlines and indentation; a docstring or string literal counts as one. Run
in the root: `python -m tests.lint.size`. Exit 1 above a limit."""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

# The size of 2026-11-28 and 2 %, the routes of vLLM in their dialects and on engines, requests compared with direct
# ones, and the weight of a request: slots for each text, limits, log-probabilities, work outside of admission. A commit
# that raises a number says why. `tests` includes the recorded outputs' driver.
LIMITS = {
    "exporters": 161_200, "alerts": 22_900, "dashboards": 50_700, "runbooks": 16_000, "stack": 334_400, "tools": 5_500,
    "tests": 811_300,
}  # fmt: skip
SKIPPED = frozenset((tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
                     tokenize.ENDMARKER))  # fmt: skip


def tokens(text: str) -> int:
    """Return the number of tokens of Python source text. An f-string is one, as it was before Python 3.12."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        depth -= name == "FSTRING_END"
        count += token.type not in SKIPPED and depth == 0 and name != "FSTRING_END"
        depth += name == "FSTRING_START"
    return count


def sizes(root: Path) -> dict[str, int]:
    """Return the tokens of each package."""
    return {name: sum(tokens(path.read_text()) for path in (root / name).rglob("*.py")) for name in LIMITS}


def main() -> int:
    found = sizes(Path.cwd())
    for name, size in found.items():
        print(f"{name:12}{size:10,} of {LIMITS[name]:10,}{'  OVER' if size > LIMITS[name] else ''}")
    print(f"{'product':12}{sum(found.values()) - found['tests']:10,}")
    return any(size > LIMITS[name] for name, size in found.items())


if __name__ == "__main__":
    sys.exit(main())

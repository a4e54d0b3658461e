"""Limits that keep the product small and the tests free of wording."""

from __future__ import annotations

import textwrap

import pytest

from stack.root import ROOT
from tests.lint import sentences, size


def test_no_package_exceeds_its_size():
    assert {} == {name: tokens for name, tokens in size.sizes(ROOT).items() if tokens > size.LIMITS[name]}


def test_docstrings_count_once_and_comments_never():
    text = '"""One docstring\nof two lines."""\n\n# a comment\nx = f(1)  # another\n'
    assert len(('"""..."""', "x", "=", "f", "(", "1", ")")) == size.tokens(text)


def test_f_strings_count_once():
    assert len(("x", "=", "f-string")) == size.tokens("x = f'a {b + f(c)} {f\"{d}\"}'\n")


def test_few_tests_compare_sentences():
    tests = sentences.comparing(ROOT)
    assert sentences.LIMIT >= len(tests), "\n".join(tests)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("assert 'the queue is full' in out", 1),
        ("assert f'the {queue} is quite full' in out", 1),
        ("assert 'queue is full' in out", 0),
        ("assert out == 3, 'a message may be long'", 0),
        ("assert 'sum by (le) (rate(x[5m]))' == out", 0),
        ("expected = 'a sentence behind a name'\nassert expected in out", 1),
        ("text = 'a sentence that is input'\nassert 3 == count", 0),
        ("assert CONSTANT in out", 1),
        ("for text in TABLE:\n    assert text in out", 1),
        ("for given, text in PAIRS.items():\n    assert text in f(given)", 1),
        ("pytest.raises(ValueError, match='no such file here')", 1),
        ("pytest.raises(ValueError, match=r'a\\.yaml: .*limt.*limit')", 0),
    ],
)
def test_sentences_are_found_where_they_are_compared(body: str, count: int, tmp_path):
    (tmp_path / "tests").mkdir()
    constants = "CONSTANT = 'a sentence of this file'\nTABLE = ['x', CONSTANT, 'a sentence of a table']\n"
    constants += "PAIRS = {'key': 'a sentence of a pair'}\n"
    text = constants + "\n\ndef test_one():\n" + textwrap.indent(body, "    ")
    (tmp_path / "tests/test_one.py").write_text(text)
    assert count == len(sentences.comparing(tmp_path))


@pytest.mark.parametrize(("name", "count"), [("fault", 1), ("given", 0)])
def test_sentences_are_found_in_parametrize_tables(name: str, count: int, tmp_path):
    (tmp_path / "tests").mkdir()
    table = f"@pytest.mark.parametrize(('given', 'fault'), [('{name} of four words', 'x')])"
    table = table if name == "given" else table.replace("('fault of four words', 'x')", "('x', 'fault of four words')")
    (tmp_path / "tests/test_one.py").write_text(f"{table}\ndef test_one(given, fault):\n    assert fault in f(x)\n")
    assert count == len(sentences.comparing(tmp_path))

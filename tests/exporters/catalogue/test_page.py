"""The fast reader of pages says what prometheus_client says, of the first page and of every later one."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from exporters.catalogue.exposition_parser import BadExposition, Exposition, Parser, parse

PAGES = sorted((Path(__file__).parents[2] / "golden").glob("*.prom"))


def _reference(text: str) -> dict[str, list[tuple[dict[str, str], float]]] | None:
    """Samples by name as prometheus_client reads them; None for what it refuses."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, KeyError, IndexError, OverflowError):
        return None
    return samples or None


def _told(text: str, parser: Parser | None = None) -> str | None:
    """The same from our reader, as text that is equal where NaNs are."""
    try:
        return repr((parser or Parser()).parse(text).samples)
    except BadExposition:
        return None


def _agrees(text: str, parser: Parser | None = None) -> None:
    expected = _reference(text)
    assert (None if expected is None else repr(expected)) == _told(text, parser)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_captured_page_is_read_as_prometheus_client_reads_it(path: Path):
    parser = Parser()
    for _ in range(2):  # the second time by its layout
        _agrees(path.read_text(), parser)


def test_one_reader_serves_many_pages_of_many_releases():
    """Between pages of other layouts, and of its own layout with other numbers."""
    parser = Parser()
    for path in (*PAGES, *reversed(PAGES)):
        _agrees(path.read_text(), parser)


@pytest.mark.parametrize(
    "text",
    [
        "a 1\n",
        "a 1",
        "a\t1\n",
        "  a   1  \r\n\r\n",
        "a 1 1395066363000\n",
        'a{b="c"} 1 1395066363000\n',
        'a{b="c d"}\t5\n',
        'a{b="c"}5\n',
        'a {b="c"} 5\n',
        'a{ b = "c" , d="e" , } 5\n',
        "a{} 5\n",
        'a{b="",} NaN\na +Inf\na -Inf\na 1e-9\na .5\n',
        'a{b="{,=} # x 1"} 2\n',
        'a{b="\\\\",c="\\"",d="\\n",e="\\x"} 1\n',
        'a{b="q\\" 7"} 1\n',
        'a{b="c"} 1 # {trace_id="x"} 0.5\n',
        'a 1 # {trace_id="x"} 0.5 1.5\n',
        '{"a.b",c="d"} 1\n',
        'a{"b.c"="d"} 1\n',
        "# a comment\n#\n# EOF\na 1\n# EOF\n",
        "# TYPE a counter\na 1\n",
        "# HELP a is\n# TYPE a counter\na 1\nb 1\na 2\n",
        "# TYPE a counter\na_total 1\na_created 2\n# TYPE b gauge\nb 1\n",
        "# TYPE a counter\n# HELP a is\na 1\n# HELP b is\na 2\n",
        '# TYPE a histogram\na_bucket{le="1"} 1\na_bucket{le="+Inf"} 2\na_sum 3\na_count 2\n# UNIT a seconds\n',
        'a{b="x\u2028y\x0bz\u00e9"} 1\n',
        "# HELP a it's \"odd\n# TYPE a gaugehistogram\na 1\n",
        # refused
        "",
        "\n# nothing\n",
        "<html>no</html>\n",
        "a\n",
        "a b\n",
        "a 1_0\n",
        "a 1 1_0\n",
        "a 0x1\n",
        'a{b="c} 1\n',
        'a{b="c"}" 1\n',
        'a{b="c"\n',
        'a{b="c",b="d"} 1\n',
        'a{b="c" d="e"} 1\n',
        "a{b=c} 1\n",
        'a{,b="c"} 1\n',
        'a{b="c",,d="e"} 1\n',
        'a{1b="c"} 1\n',
        'a{__name__="b"} 1\n',
        'a"b" 1\n',
        "1a 1\n",
        "# TYPE a\na 1\n",
        "# TYPE a odd\na 1\n",
        "# HELP 1a x\na 1\n",
    ],
)
def test_a_form_is_read_as_prometheus_client_reads_it(text: str):
    parser = Parser()
    for page in (text, text, text.replace(" 1\n", " 2\n"), text + "z 1\n", text):
        _agrees(page, parser)


_NAMES = st.from_regex(r"[a-z_:][a-z0-9_:]{0,3}", fullmatch=True)
_LABELS = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,3}", fullmatch=True), st.text(max_size=6), max_size=3)
_VALUES = st.one_of(
    st.floats().map(str),
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(["NaN", "+Inf", "-Inf", "1e3", "1_0", "x", "", "\u0661"]),
)
_AFTER = st.sampled_from(["", "", "", "", " 1395066363000", ' # {a="b"} 1', " ", "\r", "\t"])


def _series(name: str, labels: dict[str, str]) -> str:
    escaped = {k: v.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for k, v in labels.items()}
    return name + ("{" + ",".join(f'{k}="{v}"' for k, v in escaped.items()) + "}" if labels else "")


_LINES = st.one_of(
    st.builds(
        lambda series, value, after: f"{series} {value}{after}", st.builds(_series, _NAMES, _LABELS), _VALUES, _AFTER
    ),
    st.text(alphabet='ab{}=",\\ #1_\t', max_size=12),
    st.sampled_from(
        [
            "",
            "# EOF",
            "# HELP a b c",
            "# TYPE zz counter",
            "# TYPE b_total counter",
            "# TYPE c histogram",
            "# TYPE d",
            "#",
        ]
    ),
)


@settings(deadline=None)
@given(st.lists(st.lists(_LINES, max_size=4).map("\n".join), min_size=1, max_size=4))
def test_any_pages_are_read_as_prometheus_client_reads_them(pages: list[str]):
    parser = Parser()
    for text in pages:
        _agrees(text, parser)


@settings(deadline=None)
@given(
    st.lists(st.builds(_series, _NAMES, _LABELS), min_size=1, max_size=5),
    st.lists(st.lists(_VALUES, min_size=5, max_size=5), min_size=2, max_size=4),
    st.booleans(),
)
def test_same_series_with_new_values_parse_alike(series: list[str], rounds: list[list[str]], crlf: bool):
    """The same series with other values are read as Prometheus client reads them."""
    parser = Parser()
    for values in rounds:
        _agrees(
            "".join(
                f"{its} {value}\r\n"[: None if crlf else -2] + "\n" for its, value in zip(series, values, strict=False)
            ),
            parser,
        )


def test_a_series_of_the_same_length_is_another_one():
    parser = Parser()
    for text in ('a{b="c"} 1\n', 'a{b="d"} 1\n', 'b{b="d"} 1\n', 'b{b="d"} 11\n', 'b{b="d"}  1\n'):
        _agrees(text, parser)


def test_a_comment_that_grew_is_read_again():
    """A line that begins as it did last time is another one, unless a number follows."""
    parser = Parser()
    pages = [parser.parse(f"# TYPE a {kind}\na 1\n") for kind in ("gauge", "gaugehistogram")]
    assert [{"a": "gauge"}, {"a": "gaugehistogram"}] == [page.kinds for page in pages]


def test_similar_page_shares_only_labels():
    """A page like the last one shares its labels and nothing else."""
    parser = Parser()
    first, second = parser.parse('a{b="c"} 1\n'), parser.parse('a{b="c"} 2\n')
    assert ([({"b": "c"}, 1.0)], [({"b": "c"}, 2.0)]) == (first.of("a"), second.of("a"))
    assert first.of("a")[0][0] is second.of("a")[0][0]


def test_what_a_reader_remembers_is_bounded():
    """Series that come and go leave nothing behind."""
    parser = Parser()
    for at in range(200):
        parser.parse("".join(f'a{{b{at}_{n}="c"}} 1\n' for n in range(100)))
    assert len(parser._shapes) <= 10_000


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a 1\n\n<html>\n", "line 3 is '<html>'"),
        ("a 1\nb{\n", "line 2 is 'b{'"),
        ("# TYPE a x\na 1\n", "line 1 is '# TYPE a x'"),
    ],
)
def test_a_bad_page_names_the_line(text: str, line: str):
    with pytest.raises(BadExposition, match=re.escape(line)):
        parse(text)


def test_a_bad_page_between_good_ones_changes_nothing():
    parser = Parser()
    good = PAGES[0].read_text()
    parser.parse(good)
    with pytest.raises(BadExposition):
        parser.parse(good[: len(good) // 2] + '{"')
    _agrees(good, parser)


def test_a_page_answers_by_name_label_and_family():
    page = parse(
        '# TYPE a counter\na_total{b="c"} 1\na_total{b="d"} 2\na_created{b="c"} 9\n# TYPE h histogram\nh_bucket{le="1"}'
        " 1\nh_sum 3\nh_count 1\n"
    )
    assert (3.0, 2.0, None, None) == (
        page.total("a_total"),
        page.total("a_total", b="d"),
        page.total("a_total", b="x"),
        page.total("none"),
    )
    assert ["a_total", "h"] == list(page.families())
    assert "h_sum" in page
    assert [] == page.of("none") == Exposition().of("none")
    assert math.isnan(parse("a NaN\n").total("a") or 0)

"""Public traces as request records: formats by their columns, arrivals, and tokens that a prefix cache would hold."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from exporters.requests.public_trace import BLOCK_TOKENS, read_requests
from exporters.requests.read import ReadReport
from exporters.requests.record import RequestRecord, to_line

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def read(path: Path, content: str | bytes, report: ReadReport | None = None) -> list[RequestRecord]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_requests([path], report or ReadReport()))


def mooncake(ms: int, prompt: int, ids: Sequence[object]) -> str:
    return json.dumps({"timestamp": ms, "input_length": prompt, "output_length": 5, "hash_ids": ids}) + "\n"


@pytest.mark.parametrize(
    ("text", "ts", "tokens", "model", "cached"),
    [
        (AZURE + "2023-11-16 18:17:03.9799600,4808,10\r\n", "2023-11-16T18:17:03.979Z", (4808, 10), None, None),
        (AZURE + "2024-05-10 02:00:00.009930+02:00,7,1\n", "2024-05-10T00:00:00.009Z", (7, 1), None, None),
        (
            "\ufeffTIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00,3,9,2",
            "2024-10-15T00:00:00.000Z", (9, 2), None, None,
        ),
        (BURST + "5.5,1,2.0,GPT-4,472,18,490,API log\n", "1970-01-01T00:00:05.500Z", (472, 18), "GPT-4", None),
        (mooncake(27482, 700, [4, 6]), "1970-01-01T00:00:27.482Z", (700, 5), None, 0),
    ],
)  # fmt: skip
def test_columns_name_the_format(tmp_path, text, ts, tokens, model, cached):
    for content in (text, gzip.compress(text.encode()), lzma.compress(text.encode())):
        (record,) = read(tmp_path / "trace", content)
        assert (ts, tokens, model, cached) == (
            record.ts, (record.prompt_tokens, record.completion_tokens), record.model, record.cached_tokens,
        )  # fmt: skip
        assert (0.0, "ok") == (record.e2e_ms, record.outcome)


@given(some.lists(some.tuples(some.lists(some.integers(0, 2), min_size=1, max_size=5), some.integers(1, BLOCK_TOKENS))))
def test_cached_tokens_are_those_of_a_cache_without_limit(tmp_path_factory, prompts):
    """A block is in the cache if an earlier prompt began with the same blocks up to its end."""
    ids: dict[tuple[int, ...], int] = {}
    held, lines, expected = set[tuple[int, ...]](), [], []
    for blocks, last_tokens in prompts:
        prefixes = [tuple(blocks[: end + 1]) for end in range(len(blocks))]
        tokens = BLOCK_TOKENS * (len(blocks) - 1) + last_tokens
        lines.append(mooncake(0, tokens, [ids.setdefault(prefix, len(ids)) for prefix in prefixes]))
        expected.append(min(tokens - 1, BLOCK_TOKENS * sum(prefix in held for prefix in prefixes)))
        held.update(prefixes)
    found = read(tmp_path_factory.mktemp("trace") / "trace", "".join(lines))
    assert expected == [record.cached_tokens for record in found]


def test_bad_rows_are_counted_and_named(tmp_path):
    report = ReadReport()
    rows = (
        "2023-11-16 18:17:03,4,1\n\nx,4,1\n2023-11-16 18:17:03,4\n2023-11-16 18:17:03,-4,1\n2023-11-16 18:17:03,5,1\n"
    )
    assert [4, 5] == [record.prompt_tokens for record in read(tmp_path / "trace", AZURE + rows, report)]
    assert 3 == report.total
    assert "trace:4, " in report.notes[0]
    report = ReadReport()
    lines = mooncake(0, 4, [0]) + '{"timestamp": 1\n' + mooncake(0, 4, ["a"]) + mooncake(10**30, 4, [0])
    assert [4] == [record.prompt_tokens for record in read(tmp_path / "trace", lines, report)]
    assert (3, True) == (report.total, "trace:2, " in report.notes[0])


def test_a_request_log_is_read_as_one(tmp_path):
    report, record = ReadReport(), RequestRecord(request_id="a", prompt_tokens=3)
    assert [record] == read(tmp_path / "log", b"torn, line\n" + to_line(record), report)
    assert 1 == report.total
    assert [] == read(tmp_path / "log", "")
    assert [] == read(tmp_path / "log", '{"request_id": 1, "prompt": "a secret\n')


@pytest.mark.parametrize("text", ["when,prompt,reply\n1,2,3\n", '{"when": 1, "prompt": 2, "reply": 3}\n'])
def test_unknown_columns_are_named(tmp_path, text):
    with pytest.raises(ValueError, match=r"trace: .*\(when, prompt, reply\).*ContextTokens.*input_length"):
        read(tmp_path / "trace", text)


def test_a_damaged_trace_is_refused(tmp_path):
    with pytest.raises(OSError, match="cannot be read"):
        read(tmp_path / "trace", gzip.compress((AZURE + "2023-11-16 18:17:03,4,1\n" * 99).encode())[:-9])

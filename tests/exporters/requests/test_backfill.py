"""Old logs as series of the past: the same counts, at the right time, in a real Prometheus."""

from __future__ import annotations

import errno
import gzip
import io
import json
import re
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporters.requests import backfill
from exporters.requests.duplicates import RecentRequests
from exporters.requests.record import FieldMap, RequestRecord, timestamp, to_line
from exporters.sidecar_config import SidecarConfig, counting
from stack import cli

NOON = 1_790_000_040  # a whole minute, unix seconds


def record(number: int, at_s: float, **about) -> bytes:
    about = {"team": "t", "model": "m", "outcome": "ok", "prompt_tokens": 10, "ttft_ms": 30.0, **about}
    return to_line(RequestRecord(request_id=f"r{number}", ts=timestamp(at_s), **about))


def filled(
    *files: Path, step_s: int = 60, **labels: str
) -> tuple[backfill.BackfillResult, dict[str, list[tuple[float, float]]]]:
    """What was told, and the samples of each series in the order of the file, by the series' text."""
    out = io.StringIO()
    told = backfill.run(files, out, counting(SidecarConfig()), FieldMap(), RecentRequests(), step_s, labels)
    found: dict[str, list[tuple[float, float]]] = {}
    *lines, end = out.getvalue().splitlines()
    assert "# EOF" == end
    for series, value, at in (line.rsplit(" ", 2) for line in lines if not line.startswith("#")):
        found.setdefault(series, []).append((float(at), float(value)))
    return told, found


REQUESTS = 'vllm_watch_requests_total{model_name="m",outcome="ok",team="t"}'


def test_steps_hold_what_ended_and_new_series_begin_at_0(tmp_path):
    """Each step has what ended in it and what is new begins at 0."""
    path = tmp_path / "log"
    path.write_bytes(record(1, NOON + 1) + record(2, NOON + 59.9) + record(3, NOON + 60) + record(4, NOON + 200))
    told, found = filled(path)
    assert [(NOON, 0), (NOON + 60, 2), (NOON + 120, 3), (NOON + 180, 3), (NOON + 240, 4)] == found[REQUESTS]
    assert (4, 0) == (told.requests, told.late)
    assert [(NOON, 0), (NOON + 60, 20)] == found['vllm_watch_tokens_total{model_name="m",team="t",type="prompt"}'][:2]


def test_overlapping_files_count_a_line_once(tmp_path):
    """Two gateways, one of their logs packed; and one line that stands in both."""
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    one.write_bytes(record(1, NOON + 1) + record(2, NOON + 130))
    other.write_bytes(gzip.compress(record(3, NOON + 70) + record(2, NOON + 130)))
    told, found = filled(one, other)
    assert [1, 2, 3] == [value for _, value in found[REQUESTS][1:]]
    assert (3, 1, 0) == (told.requests, told.report.repeats, told.late)


def test_unreadable_and_unplaceable_lines_are_reported(tmp_path):
    """What cannot be placed or read is told and costs nothing else."""
    path = tmp_path / "log"
    path.write_bytes(
        record(1, NOON)
        + b'{"request_id":"x","model":"m"}\n'
        + b"nonsense\n"
        + b"x" * (3 << 20)
        + b"\n"
        + record(2, NOON + 5)
    )
    told, found = filled(path)
    assert (2, 1, {"json": 1, "long": 1}) == (told.requests, told.untimed, dict(told.report.counts))
    assert 2 == found[REQUESTS][-1][1]


@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: data[:40] + b"\xff" * 40 + data[80:]])
def test_a_packed_file_that_is_spoilt_is_named(tmp_path, spoil):
    path = tmp_path / "log.gz"
    path.write_bytes(
        spoil(
            gzip.compress(
                b"".join(record(number, NOON + number, team=f"t{number * 7919 % 31}") for number in range(200))
            )
        )
    )
    with pytest.raises(OSError, match=r"/log\.gz") as caught:
        filled(path)
    assert errno.EBADMSG == caught.value.errno


def test_late_line_is_counted_later_and_reported(tmp_path):
    """A line that comes after its step is counted later and said."""
    path = tmp_path / "log"
    path.write_bytes(record(1, NOON + 1) + record(2, NOON + 100) + record(3, NOON + 2))
    told, found = filled(path)
    assert (3, 1) == (told.requests, told.late)
    assert 3 == found[REQUESTS][-1][1]


@pytest.mark.prometheus
def test_promtool_import_adds_up_to_the_log(tmp_path, past):
    """Growth over the whole time is every request and token of the log, and a quantile can be asked."""
    log, page = tmp_path / "log", tmp_path / "past.om"
    lines = [
        record(
            n, NOON + 7 * n, team=f"t{n % 3}", ttft_ms=30.0 + n, e2e_ms=50.0 + n, outcome="ok" if n % 5 else "timeout"
        )
        for n in range(400)
    ]
    log.write_bytes(b"".join(lines))
    result = CliRunner().invoke(
        cli.main, ["sidecar", "backfill", str(log), "--out", str(page), "--label", "job=sidecar"]
    )
    assert 0 == result.exit_code, result.output
    assert "400 requests from" in result.output
    address = past(page)

    def ask(query: str, at_s: float) -> float:
        asked = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query, 'time': at_s})}"
        (answer,) = json.load(urllib.request.urlopen(asked, timeout=10))["data"]["result"]
        return float(answer["value"][1])

    end = NOON + 2880
    assert 400 == pytest.approx(ask("sum(increase(vllm_watch_requests_total{job='sidecar'}[49m]))", end), rel=0.03), (
        "increase extrapolates"
    )
    assert 400 == ask("sum(vllm_watch_requests_total)", end)
    assert 0 == ask("sum(vllm_watch_requests_total)", NOON + 1)
    assert 4000 == ask("sum(vllm_watch_tokens_total{type='prompt'})", end)
    assert 400 == ask("sum(vllm_watch_e2e_seconds_bucket{le='+Inf'})", end)
    assert 0.2 < ask("histogram_quantile(0.5, sum by (le) (vllm_watch_ttft_seconds_bucket))", end) < 0.25


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--label", "9=x"], "--label '9' .* job=sidecar"),
        (["--label", "team=x"], "--label team .*another name"),
        (["--step", "999"], "1<=x<=240"),
    ],
)
def test_a_mistake_names_the_way_out(tmp_path, arguments, values):
    (tmp_path / "log").write_bytes(record(1, NOON))
    result = CliRunner().invoke(
        cli.main, ["sidecar", "backfill", str(tmp_path / "log"), "--out", str(tmp_path / "o"), *arguments]
    )
    assert 2 == result.exit_code
    assert re.search(values, result.output)


def test_a_log_without_times_makes_no_series_and_says_so(tmp_path):
    (tmp_path / "log").write_bytes(b'{"request_id":"x","model":"m"}\n')
    result = CliRunner().invoke(cli.main, ["sidecar", "backfill", str(tmp_path / "log"), "--out", str(tmp_path / "o")])
    assert 1 == result.exit_code
    assert f"{tmp_path / 'o'} has no series" in result.output
    assert "1 lines without ts" in result.output

"""Records and lines are two forms of the same thing, and a line never grows beyond its bound."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporters.requests.record import (
    MAX_LINE_BYTES,
    BadLine,
    FieldMap,
    RequestRecord,
    ended_at,
    estimated_tokens,
    fitting_line,
    parse_block,
    parse_line,
    timestamp,
    to_line,
)

FULL = RequestRecord(
    request_id="8f14e45fceea167a5a36dedd4bea2543", ts="2026-05-12T09:30:00.123Z",
    trace_id="0af7651916cd43dd8448eb211c80319c",
    span_id="b7ad6b7169203331", parent_span_id="00f067aa0ba902b7", sampled=False, team="demo", priority="default",
    model="tiny",
    adapter="sql", route="/v1/chat/completions",
    upstream="127.0.0.1:8001", prefill_engine="p-0:8000", decode_engine="d-0:8000",
    variant="canary", engine_version="0.32.0", attempt=1, stream=True, n=1,
    prompt_tokens=113, cached_tokens=96,
    completion_tokens=24, cache_hit=True, queue_ms=0.0, ttft_ms=12.345, tpot_ms=1.5, e2e_ms=48.75, engine_queue_ms=0.01,
    engine_ttft_ms=2.266,
    status=200, finish_reason="length", outcome="ok",
)  # fmt: skip


def test_a_record_survives_its_line():
    assert FULL == parse_line(to_line(FULL))
    assert RequestRecord(request_id="x") == parse_line(to_line(RequestRecord(request_id="x")))
    assert b'{"request_id":"x"}\n' == to_line(RequestRecord(request_id="x"))


def test_the_lab_format_is_read_as_it_stands():
    line = b'{"request_id":"r1","model":"m","prompt_tokens":9,"completion_tokens":3,"ttft_ms":10,"tpot_ms":2,"cache_hit":false,"finish_reason":"stop"}'  # noqa: E501
    record = parse_line(line)
    assert (None, None, None, 9, False) == (
        record.ts,
        record.team,
        record.outcome,
        record.prompt_tokens,
        record.cache_hit,
    )


def test_other_names_can_be_mapped():
    assert "r1" == parse_line(b'{"id":"r1","more":{"x":[1]}}', {"id": "request_id"}).request_id


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "json"),
        (b"{", "json"),
        (b'{"request_id":"\xff"}', "json"),
        (b"[]", "type"),
        (b"{}", "type"),
        (b'{"request_id":7}', "type"),
        (b'{"request_id":"x","outcome":"odd"}', "type"),
        (b'{"request_id":"x","ts":"yesterday"}', "type"),
        (b'{"request_id":"x","ttft_ms":-1}', "range"),
        (b'{"request_id":"x","prompt_tokens":1000000000000}', "range"),
        (b'{"request_id":"x","prompt_tokens":' + b"9" * 400 + b"}", "range"),
        (b'{"request_id":"x","e2e_ms":1e12}', "range"),
        (b'{"request_id":"x","e2e_ms":1e999}', "range"),
        (b'{"request_id":"x","e2e_ms":"1"}', "type"),
        (b'{"request_id":"x","n":1.5}', "type"),
        (b'{"request_id":"x","model":{"request_id":"y"}', "json"),
        (b'{"request_id":"x","prompt_tokens":86,"cached_tokens":87}', "range"),
        (b'{"request_id":"x","prompt_tokens":0,"cached_tokens":1}', "range"),
    ],
)
def test_a_bad_line_says_what_kind_of_bad(line: bytes, reason: str):
    with pytest.raises(BadLine) as caught:
        parse_line(line)
    assert reason == caught.value.reason


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_a_bad_line(line: bytes):
    for names in (None, {"a": "request_id"}):
        reason = "record"
        try:
            parse_line(line, names)
        except BadLine as error:
            reason = error.reason
        assert reason in ("record", "json", "type", "range")


def test_deep_nesting_is_a_bad_line():
    for text in (b'{"x":' + b"[" * 200_000, b"[" * 200_000):
        with pytest.raises(BadLine):
            parse_line(text)


def test_to_line_refuses_and_fitting_line_cuts():
    """What a client may write without bound loses its end; numbers and ids of the trace stay."""
    long = msgspec.structs.replace(
        FULL, model="m" * 5000, request_id="\\" * 128, adapter="\x01" * 300, finish_reason="é" * 32
    )
    with pytest.raises(BadLine):
        to_line(long)
    line = fitting_line(long)
    assert len(line) <= MAX_LINE_BYTES
    record = parse_line(line)
    assert (FULL.trace_id, FULL.completion_tokens, "mmm") == (
        record.trace_id,
        record.completion_tokens,
        (record.model or "")[:3],
    )
    assert to_line(FULL) == fitting_line(FULL)


def test_an_ordinary_record_is_not_cut():
    """With the longest names that are in use, an id as long as theirs, and every figure."""
    ordinary = msgspec.structs.replace(
        FULL, model="meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", adapter="customer-support-german-2026-10",
        tried="gpu-a:upstream_down",
        request_id="chatcmpl-8f14e45f-ceea-467a-b5a3-6dedd4bea254",
        upstream="vllm-prefill-7d9c6b5f4-x2k8p.inference.svc:8000",
        prompt_tokens=131072, cached_tokens=65536, completion_tokens=16384, queue_ms=123456.789, ttft_ms=123456.789,
        tpot_ms=123.456,
        e2e_ms=1234567.891, engine_queue_ms=12345.678, engine_ttft_ms=12345.678, est_prompt_tokens=131072,
        retry_after_s=120.0,
    )  # fmt: skip
    assert ordinary == parse_line(fitting_line(ordinary))


def test_the_worst_record_that_a_gateway_can_write_fits():
    big = 10**12 - 1
    numbers = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "est_prompt_tokens"), big)
    times = dict.fromkeys(
        ("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms", "engine_queue_ms", "engine_ttft_ms"), 123456789.123
    )
    texts = dict.fromkeys(
        (
            "request_id",
            "model",
            "adapter",
            "priority",
            "upstream",
            "prefill_engine",
            "decode_engine",
            "variant",
            "engine_version",
            "finish_reason",
        ),
        "\x01" * 200,
    )
    worst = msgspec.structs.replace(FULL, **numbers, **times, **texts, team="t" * 40, route="/v1/audio/transcriptions",
        n=999999, retry_after_s=1e9,
                                    outcome="upstream_error", reason="gateway_stopped", cache_hit=False,
                                    unreadable="content_type",
                                    stream=False)  # fmt: skip
    assert len(fitting_line(worst)) <= MAX_LINE_BYTES


def test_times_go_round():
    assert "2026-05-12T09:30:00.123Z" == timestamp(1778578200.123)
    assert ended_at(FULL) == pytest.approx(1778578200.123)
    assert ended_at(RequestRecord(request_id="x")) is None
    assert ended_at(RequestRecord(request_id="x", ts="2026-05-12T09:30:00+02:00")) == pytest.approx(1778578200.0 - 7200)


def _reasons(block: bytes, fields: FieldMap | None = None) -> tuple[list[str], list[tuple[bytes, str]]]:
    records, bad = parse_block(block, fields)
    return [record.request_id for record in records], [(line, error.reason) for line, error in bad]


def test_a_block_of_records_is_read_at_once_and_as_one_by_one():
    lines = [to_line(msgspec.structs.replace(FULL, request_id=f"r{i}")) for i in range(100)]
    assert ([parse_line(line) for line in lines], []) == parse_block(b"".join(lines))
    assert ([], []) == parse_block(b"")


@pytest.mark.parametrize(
    ("block", "kept", "bad"),
    [
        (b'{"request_id":"a"}\n{"request_id":"b"}', ["a", "b"], []),  # the last newline is not needed
        (b'{"request_id":"a"}\r\n{"request_id":"b"}\r\n', ["a", "b"], []),
        (b'\n{"request_id":"a"}\n \n\n{"request_id":"b"}\n', ["a", "b"], []),
        (b'\xef\xbb\xbf{"request_id":"a"}\n', ["a"], []),
        (b'\xef\xbb\xbf\n{"request_id":"a"}\n', ["a"], []),
        (b'no\n{"request_id":"a"}\n{}\n', ["a"], [(b"no", "json"), (b"{}", "type")]),
        (b'{"request_id":"a","n":-1}\n{"request_id":"b"}\n', ["b"], [(b'{"request_id":"a","n":-1}', "range")]),
        (b'{"request_id":"a","ts":"now"}\n{"request_id":"b"}\n', ["b"], [(b'{"request_id":"a","ts":"now"}', "type")]),
        (
            b'{"request_id":"a","prompt_tokens":1,"cached_tokens":2}\n{"request_id":"b","cached_tokens":2}\n',
            ["a", "b"],
            [(b'{"request_id":"a","prompt_tokens":1,"cached_tokens":2}', "range")],
        ),
        # one record on two lines is no record
        (b'{"request_id":\n"a"}\n', [], [(b'{"request_id":', "json"), (b'"a"}', "json")]),
    ],
)
def test_a_block_keeps_what_is_sound(block: bytes, kept: list[str], bad: list[tuple[bytes, str]]):
    assert (kept, bad) == _reasons(block)


def test_what_follows_a_line_that_broke_off_is_kept():
    """A writer that died left half a line, wherever that broke; the next one began behind it."""
    line, whole = to_line(FULL), to_line(msgspec.structs.replace(FULL, request_id="next"))
    for at in range(1, len(line) - 2):
        assert (["next"], [(line[:at], "torn")]) == _reasons(line[:at] + whole)


def test_two_records_whose_newline_was_lost_are_both_kept():
    assert (["a", "b"], []) == _reasons(b'{"request_id":"a"}{"request_id":"b"}\n')


def test_an_object_within_a_line_that_broke_off_is_no_record():
    """Else whoever may write an object into a foreign log could write records."""
    line = b'{"id":"a","metadata":{"request_id":"forged"}'
    assert ([], [(line, "json")]) == _reasons(line + b"\n", FieldMap({"id": "request_id"}))


_SOUND = st.builds(
    lambda name, ms, at: to_line(RequestRecord(request_id=name, e2e_ms=ms, ts=timestamp(at)))[:-1],
    st.text(max_size=9), st.floats(0, 1e11), st.floats(0, 4e9),
)  # fmt: skip
_ODD = st.one_of(
    st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")),
    st.sampled_from(
        [
            b"",
            b"{}",
            b"[]",
            b'{"request_id":"x","ts":"20"}',
            b'{"request_id":"x","n":-1}',
            b'{"request_id":"x"',
            b'{"request_id":"x"} ',
        ]
    ),
)


@settings(deadline=None)
@given(st.lists(st.one_of(_SOUND, _SOUND, _ODD), max_size=8))
@example([b'{"request_id":"x"}{"request_id":"y"}', b""])
def test_a_block_is_read_as_its_lines_are(lines: list[bytes]):
    """Nothing that one line holds changes what is read from another."""
    records, bad = parse_block(b"\n".join(lines))
    each = [parse_block(line) for line in lines]
    assert [record for found, _ in each for record in found] == records
    assert [(line, error.reason) for _, refused in each for line, error in refused] == [
        (line, error.reason) for line, error in bad
    ]


def test_no_message_quotes_what_a_line_holds():
    secret = b"TELLNOONE"
    for text in (
        b'{"request_id":"x","outcome":"%s"}',
        b'{"request_id":"x","ts":"%s"}',
        b'{"request_id":"x","n":"%s"}',
        b'{"request_id":"x","n":%s}',
        b'{"%s":1}',
        b"%s",
        b'{"request_id":"x","model":{"%s":1}}',
        b'{"request_id":"x"%s{"request_id":"y"}',
    ):
        for fields in (None, FieldMap({"n": "e2e_s", "ts": "ts_s"}, {"outcome": {"yes": "ok"}})):
            ((_, error),) = parse_block(text % secret, fields)[1]
            assert secret.decode() not in str(error)


LITELLM = FieldMap(  # the standard logging payload of LiteLLM, as its callbacks write it
    {
        "id": "request_id",
        "endTime": "ts_s",
        "metadata.user_api_key_team_alias": "team",
        "model_group": "model",
        "status": "outcome",
        "cache_hit": "ignore",
    },
    {"outcome": {"success": "ok", "failure": "upstream_error"}},
)
LITELLM_LINE = (
    b'{"id":"chatcmpl-9f","trace_id":"1f","call_type":"acompletion","stream":true,"response_cost":0.0,"status":"success","total_tokens":37,'
    b'"prompt_tokens":13,"completion_tokens":24,"startTime":1778578199.0,"endTime":1778578200.123,"completionStartTime":1778578199.4,'
    b'"model":"hosted_vllm/tiny","model_group":"tiny","api_base":"http://127.0.0.1:8000/v1","metadata":{"user_api_key_hash":"88dc",'
    b'"user_api_key_alias":null,"user_api_key_team_id":"t-1","user_api_key_team_alias":"search"},"cache_hit":true,"request_tags":[],'
    b'"messages":[{"role":"user","content":"{\\"id\\":\\"x\\"}"}],"response":{"choices":[]},"error_str":null}\n'
)
ENVOY = FieldMap(  # the JSON access log of an Envoy gateway; its field names are those that the operator gave it
    {
        "x-request-id": "request_id",
        "duration": "e2e_ms",
        "upstream_time": "ttft_s",
        "gen_ai.request.model": "model",
        "gen_ai.usage.input_tokens": "prompt_tokens",
        "gen_ai.usage.output_tokens": "completion_tokens",
        "response_code": "status",
        "response_code_details": "outcome",
    },
    {"outcome": {"via_upstream": "ok", "downstream_remote_disconnect": "client_abort"}},
)
ENVOY_LINE = (
    b'{"start_time":"2026-05-12T09:30:00.123Z","method":"POST","x-request-id":"4c1d","response_code":200,"response_code_details":"via_upstream",'
    b'"duration":1250,"upstream_time":0.25,"gen_ai.request.model":"tiny","gen_ai.usage.input_tokens":13,"gen_ai.usage.output_tokens":24,'
    b'"x-forwarded-for":null}\n'
)


@pytest.mark.parametrize(
    ("line", "fields", "expected"),
    [
        (
            LITELLM_LINE,
            LITELLM,
            RequestRecord(
                request_id="chatcmpl-9f",
                ts="2026-05-12T09:30:00.123Z",
                trace_id="1f",
                team="search",
                model="tiny",
                stream=True,
                prompt_tokens=13,
                completion_tokens=24,
                outcome="ok",
            ),
        ),
        (
            ENVOY_LINE,
            ENVOY,
            RequestRecord(
                request_id="4c1d",
                model="tiny",
                status=200,
                prompt_tokens=13,
                completion_tokens=24,
                ttft_ms=250.0,
                e2e_ms=1250,
                outcome="ok",
            ),
        ),
    ],
)
def test_the_log_of_another_gateway_is_read(line: bytes, fields: FieldMap, expected: RequestRecord):
    assert ([expected, expected], []) == parse_block(line + line, fields)


@pytest.mark.parametrize(
    ("names", "line", "ours", "expected"),
    [
        ({"latency": "e2e_s"}, b'{"latency":1.5}', "e2e_ms", 1500.0),
        ({"latency": "ttft_us"}, b'{"latency":1500}', "ttft_ms", 1.5),
        ({"latency": "queue_ns"}, b'{"latency":2500000}', "queue_ms", 2.5),
        ({"wait": "retry_after_ms"}, b'{"wait":500}', "retry_after_s", 0.5),
        ({"end": "ts_ms"}, b'{"end":1778578200123}', "ts", "2026-05-12T09:30:00.123Z"),
        ({"usage.prompt_tokens": "prompt_tokens"}, b'{"usage":{"prompt_tokens":7}}', "prompt_tokens", 7),
        ({"a.b.c": "team"}, b'{"a":{"b.c":"x"}}', "team", "x"),
        ({"usage.prompt_tokens": "prompt_tokens"}, b'{"usage":null}', "prompt_tokens", None),
        ({"usage.prompt_tokens": "prompt_tokens"}, b'{"usage":[1]}', "prompt_tokens", None),
        # ours is understood where theirs is not there
        ({"usage.prompt_tokens": "prompt_tokens"}, b'{"prompt_tokens":3}', "prompt_tokens", 3),
        ({"alias": "team", "org": "team"}, b'{"alias":null,"org":"x"}', "team", "x"),
        ({"alias": "team", "org": "team"}, b'{"org":"x","alias":"y"}', "team", "y"),
        ({"status": "ignore"}, b'{"status":"success"}', "status", None),
        ({"at": "start_ts", "d": "e2e_s"}, b'{"at":"2026-05-12T09:30:00Z","d":1.5}', "ts", "2026-05-12T09:30:01.500Z"),
        ({"at": "start_ts_ms", "d": "e2e_ms"}, b'{"at":1778578200000,"d":250}', "ts", "2026-05-12T09:30:00.250Z"),
        (
            {"ts": "start_ts", "d": "e2e_ms"},
            b'{"ts":"2026-05-12T11:30:00+02:00","d":0}',
            "ts",
            "2026-05-12T09:30:00.000Z",
        ),
        ({"at": "start_ts"}, b'{"at":"2026-05-12T09:30:00Z"}', "ts", None),  # no duration: the end is unknown
        ({}, b'{"status":200}', "outcome", None),  # never guessed
    ],
)
def test_a_field_is_found_under_its_name_and_in_its_unit(names: dict[str, str], line: bytes, ours: str, expected: Any):
    fields = FieldMap({"request_id": "request_id", **names})
    assert expected == getattr(parse_line(line[:-1] + b',"request_id":"x"}', fields), ours)


@pytest.mark.parametrize(
    ("names", "line", "reason"),
    [
        ({"latency": "e2e_s"}, b'{"request_id":"x","latency":"1.5"}', "type"),
        ({"latency": "e2e_s"}, b'{"request_id":"x","latency":true}', "type"),
        ({"latency": "e2e_s"}, b'{"request_id":"x","latency":-0.1}', "range"),
        ({"latency": "e2e_s"}, b'{"request_id":"x","latency":1e307}', "range"),
        ({"latency": "e2e_s"}, b'{"request_id":"x","latency":' + b"9" * 400 + b"}", "range"),
        ({"end": "ts_s"}, b'{"request_id":"x","end":1e300}', "type"),
        ({"at": "start_ts", "d": "e2e_s"}, b'{"request_id":"x","at":"noon","d":1}', "type"),
        ({"at": "start_ts_s", "d": "e2e_s"}, b'{"request_id":"x","at":1e300,"d":1}', "type"),
        ({"state": "outcome"}, b'{"request_id":"x","state":"fine"}', "type"),
        ({"usage.n": "n"}, b'{"request_id":"x","usage":{"n":1e999}}', "range"),
        ({"fresh": "prompt_fresh_tokens"}, b'{"request_id":"x","fresh":-5,"cached_tokens":9}', "range"),
        ({"fresh": "prompt_fresh_tokens"}, b'{"request_id":"x","fresh":"5"}', "type"),
        ({"fresh": "prompt_fresh_tokens"}, b'{"request_id":"x","fresh":999999999999,"cached_tokens":1}', "range"),
    ],
)
def test_a_foreign_line_is_held_to_the_same_bounds(names: dict[str, str], line: bytes, reason: str):
    with pytest.raises(BadLine) as caught:
        parse_line(line, FieldMap(names))
    assert reason == caught.value.reason


ANTHROPIC = FieldMap(
    {
        "usage.input_tokens": "prompt_fresh_tokens", "usage.cache_creation_input_tokens": "prompt_written_tokens",
        "usage.cache_read_input_tokens": "cached_tokens",
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("usage", "prompt", "cached"),
    [
        ({"input_tokens": 86, "cache_read_input_tokens": 17_817}, 17_903, 17_817),
        ({"input_tokens": 5, "cache_read_input_tokens": None, "cache_creation_input_tokens": 3}, 8, None),
        ({"input_tokens": 0, "cache_read_input_tokens": 0}, 0, 0),
        ({"cache_read_input_tokens": 4}, None, 4),
    ],
)
def test_parts_of_a_prompt_are_summed(usage: dict[str, int], prompt: int | None, cached: int | None):
    line = msgspec.json.encode({"request_id": "x", "prompt_tokens": None, "usage": usage})
    ((record,), _) = parse_block(line, ANTHROPIC)
    assert (prompt, cached) == (record.prompt_tokens, record.cached_tokens)


@pytest.mark.parametrize(
    ("given", "prompt", "completion"),
    [
        ({}, None, None),
        ({"est_completion_tokens": 7}, 40, 7),
        ({"est_completion_tokens": 7, "prompt_tokens": 9}, None, 7),
        ({"est_completion_tokens": 7, "completion_tokens": 9}, None, None),
        ({"unreadable": "usage", "outcome": "ok"}, 40, None),  # embeddings have no completion
        ({"unreadable": "usage", "outcome": "ok", "completion_tokens": 9}, 40, None),
        ({"unreadable": "usage", "outcome": "ok", "prompt_tokens": 9}, None, None),
        ({"unreadable": "json", "outcome": "upstream_error"}, None, None),
    ],
)
def test_estimates_stand_in_for_usage(given: dict[str, Any], prompt: int | None, completion: int | None):
    record = RequestRecord(request_id="x", est_prompt_tokens=40, **given)
    assert (prompt, completion) == estimated_tokens(record)


def test_words_are_translated_whatever_their_json_type():
    fields = FieldMap(
        {"code": "outcome", "hit": "cache_hit"},
        {"outcome": {"200": "ok", "499": "client_abort", "0": None}, "cache_hit": {"HIT": True}},
    )
    assert "ok" == parse_line(b'{"request_id":"x","code":200}', fields).outcome
    assert "client_abort" == parse_line(b'{"request_id":"x","code":"499"}', fields).outcome
    assert parse_line(b'{"request_id":"x","code":0}', fields).outcome is None
    assert parse_line(b'{"request_id":"x","hit":"HIT"}', fields).cache_hit is True


@pytest.mark.parametrize(
    ("names", "values", "mistake"),
    [
        ({"a": "prompt_token"}, {}, r"^field_names .*'prompt_token', .* prompt_tokens\?$"),
        ({"a": "prompt_tokens_s"}, {}, "^field_names .*'prompt_tokens_s', "),
        ({"a": "e2e_h"}, {}, r"^field_names .*'e2e_h', .* e2e_ms\?$"),
        ({"a": "prompt_fresh_token"}, {}, r"prompt_fresh_tokens\?$"),
        ({"a": "prompt_fresh_tokens", "b": "prompt_tokens"}, {}, "prompt_tokens .* prompt_fresh_tokens"),
        ({"a": "prompt_written_tokens", "b": "prompt_tokens"}, {}, "without prompt_fresh_tokens"),
        ({}, {"outcomes": {"a": "ok"}}, r"^field_values .*'outcomes', .* outcome\?$"),
        ({}, {"outcome": {"a": "okay"}}, r"^field_values .*'okay', .* outcome; .* ok\?$"),
        ({}, {"prompt_tokens": {"none": -1}}, "^field_values .* -1, .* prompt_tokens"),
    ],
)
def test_a_mapping_that_leads_nowhere_is_refused(
    names: dict[str, str], values: dict[str, dict[str, Any]], mistake: str
):
    with pytest.raises(ValueError, match=mistake):
        FieldMap(names, values)

"""What a request asks for in tokens, the changes to its body, and the estimates made of it. Pure: no engine, no
sockets."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack.gateway import prompt_size, request_fields, routes
from stack.gateway import request_body as token_requests
from stack.gateway.estimate import (
    BYTES_PER_TOKEN,
    LEAST_BYTES,
    LONGEST_NAME,
    MEDIA_TOKENS,
    MOST_BYTES,
    MOST_NAMES,
    MOST_PAIRS,
    OUTPUT_TOKENS,
    Estimator,
    Outputs,
)
from stack.gateway.lenient_json import to_strict
from stack.gateway.request_body import TokenRequest, read

CHAT, BATCH, TEXT, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "chat/completions/batch", "completions", "responses", "messages")
)
EMBEDDINGS, RERANK, SCORE, SYSTEM_ONE, DECISIONS, AUDIO = (
    f"/v1/{name}" for name in ("embeddings", "rerank", "score", "systemone", "decisions", "audio/transcriptions")
)
QUESTIONS = [
    {"type": "predicate", "instructions": "Is it?"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b", "description": "bee"}]},
]
QUESTION_BYTES = len("Is it?Which?" + json.dumps(QUESTIONS[1]["choices"]))
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}


def asked(route: str, **fields: Any) -> TokenRequest:
    return read(route, json.dumps(fields).encode())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# ---- what is asked for


@pytest.mark.parametrize(
    ("route", "fields", "max_tokens", "outputs"),
    [
        (CHAT, {}, None, 1),
        (CHAT, {"max_tokens": 7}, 7, 1),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 5}, 5, 1),
        (CHAT, {"max_tokens": 7, "max_output_tokens": 9}, 7, 1),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 0}, 7, 1),
        (CHAT, {"max_completion_tokens": 0}, None, 1),
        (TEXT, {"max_tokens": 7, "max_completion_tokens": 100}, 7, 1),
        (MESSAGES, {"max_tokens": 7, "n": 3, "best_of": 4}, 7, 1),
        (RESPONSES, {"max_output_tokens": 7, "n": 3}, 7, 1),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": None}, 7, 1),
        (CHAT, {"max_output_tokens": 7}, None, 1),
        (CHAT, {"n": 3, "best_of": None}, None, 3),
        (CHAT, {"n": 2, "use_beam_search": True}, None, 2),
        (BATCH, {"messages": [[user("a")], [user("b")]], "max_tokens": 9}, 9, 2),
        (TEXT, {}, 16, 1),
        (TEXT, {"max_tokens": None}, None, 1),
        (TEXT, {"max_completion_tokens": 5}, 16, 1),
        (TEXT, {"max_tokens": 0}, 0, 1),
        (TEXT, {"prompt": ["a", "b", "c"], "n": 2, "best_of": 4}, 16, 12),
        (TEXT, {"prompt": [[1, 2], [3]], "n": 2}, 16, 4),
        (TEXT, {"prompt": [1, 2, 3]}, 16, 1),
        (TEXT, {"prompt": None, "prompt_embeds": ["QUJD", "QUJD"]}, 16, 2),
        (TEXT, {"prompt": []}, 16, 1),
        (RESPONSES, {}, None, 1),
        (RESPONSES, {"max_output_tokens": 8, "max_tokens": 3}, 8, 1),
        (MESSAGES, {"max_tokens": 8, "max_completion_tokens": 3}, 8, 1),
        (EMBEDDINGS, {"input": ["a", "b"], "max_tokens": 5}, 0, 0),
        (RERANK, {"query": "q", "documents": ["a", "b"]}, 0, 0),
        (SCORE, {"text_1": "q", "text_2": ["a", "b"]}, 0, 0),
        (SYSTEM_ONE, {"state": "s", "questions": {}}, 1, 1),
        (DECISIONS, {"input": "s", "questions": QUESTIONS}, 1, 2),
        ("/v1/models", {"max_tokens": 5}, None, 1),
    ],
)
def test_output_limit_is_of_the_field_the_route_obeys(
    route: str, fields: dict[str, Any], max_tokens: int | None, outputs: int
):
    """The limit of output is that of the field that the route obeys."""
    found = asked(route, **fields)
    assert (max_tokens, outputs) == (found.max_tokens, found.outputs)


GENERATE, COHERE_CHAT = "/inference/v1/generate", "/cohere/v2/chat"
INCLUDE = {"include": ["message.output_text.logprobs"]}
ALL = 100_000


@pytest.mark.parametrize(
    ("route", "fields", "logprobs", "prompt_logprobs"),
    [
        (CHAT, {"top_logprobs": 5, "logprob_token_ids": []}, 0, 0),
        (CHAT, {"logprobs": True}, 1, 0),
        (CHAT, {"logprobs": "yes", "top_logprobs": 20.0}, 21, 0),
        (CHAT, {"logprobs": 1, "top_logprobs": "20"}, 21, 0),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, ALL, 0),
        (CHAT, {"logprobs": True, "top_logprobs": "0" * 70_000 + "5"}, ALL, 0),
        (CHAT, {"logprobs": True, "top_logprobs": -2}, 1, 0),
        (CHAT, {"logprobs": True, "top_logprobs": None}, 1, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 10**30}, ALL, 0),
        (CHAT, {"logprobs": True, "logprob_token_ids": [1, 2, 3]}, 4, 0),
        (CHAT, {"prompt_logprobs": True}, 0, 2),
        (CHAT, {"prompt_logprobs": 0, "echo": True, "top_logprobs": 9}, 0, 1),
        (CHAT, {"logprobs": True, "echo": "on", "top_logprobs": 3}, 4, 4),
        (CHAT, {"echo": True}, 0, 1),
        (CHAT, {"n": 4, "use_beam_search": True}, 9, 0),
        (BATCH, {"messages": [[user("a")]], "prompt_logprobs": "7"}, 0, 8),
        (TEXT, {"logprobs": 0}, 1, 0),
        (TEXT, {"logprobs": True, "top_logprobs": 7}, 2, 0),
        (TEXT, {"logprobs": 2, "echo": 1}, 3, 3),
        (TEXT, {"echo": True}, 0, 0),
        (TEXT, {"logprobs": 2, "prompt_logprobs": -1}, 3, ALL),
        (RESPONSES, {"top_logprobs": 5, "include": ["reasoning.encrypted_content"]}, 0, 0),
        (RESPONSES, INCLUDE, 1, 0),
        (RESPONSES, {"top_logprobs": 5, **INCLUDE}, 6, 0),
        (GENERATE, {"sampling_params": {"logprobs": "3", "prompt_logprobs": 1}}, 4, 2),
        (GENERATE, {"sampling_params": {"prompt_logprob_token_ids": [[1], [2, 3], []]}, "logprobs": 9}, 0, 3),
        (COHERE_CHAT, {"logprobs": True, "top_logprobs": 9, "prompt_logprobs": 9}, 1, 0),
        (MESSAGES, {"logprobs": True, "prompt_logprobs": 9}, 0, 0),
    ],
)
def test_logprobs_are_counted_as_vllm_reads_them(
    route: str, fields: dict[str, Any], logprobs: int, prompt_logprobs: int
):
    """By the request models of vLLM 0.32."""
    found = asked(route, **fields)
    assert (logprobs, prompt_logprobs) == (found.logprobs, found.prompt_logprobs)


@pytest.mark.parametrize(
    ("spelled", "number"),
    [
        ("5", 5),
        ("5.0", 5),
        ('"5"', 5),
        ('" 5 "', 5),
        ('"5.0"', 5),
        ('"+5"', 5),
        ('"1_000"', 1000),
        ('"005"', 5),
        ('"\u00a060\u2003"', 60),
        ('"' + "0" * 4400 + '60"', 60),
        ('"0-5"', None),
        ('"\u0665"', None),
        ('".0"', None),
        ('"0_"', None),
        ('"-_5"', None),
        ('"60."', None),
        ('"' + "1" * 9001 + '"', None),
        ("true", 1),
        ("1e5", 100000),
        ("5.5", None),
        ('"5.5"', None),
        ('"5e2"', None),
        ('"x"', None),
        ('""', None),
        ("-5", None),
        ('"-5"', None),
        ("[5]", None),
        ('{"a":5}', None),
        ("1e999", None),
        ("1" + "0" * 30, request_fields.MOST_TOKENS),
        ("9" * 5000, None),
        ('"' + "9" * 5000 + '"', None),
    ],
)
def test_numbers_are_understood_as_pydantic_would(spelled: str, number: int | None):
    """Tried with pydantic 2 and a field `int | None`; what is larger than any context is only that."""
    body = f'{{"max_tokens":{spelled},"n":{spelled}}}'.encode()
    found = read(CHAT, body)
    small = number if number is not None and number <= token_requests.MOST_N else None
    assert (number, small, max(1, number or 0)) == (found.max_tokens, found.n, found.outputs)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("true", True),
        ("1", True),
        ('"yes"', True),
        ("false", False),
        ("0", False),
        ('"no"', False),
        ("null", False),
        ("[true]", False),
    ],
)
def test_a_stream_cannot_escape_accounting_by_its_spelling(stream: str, expected: bool):
    """The engine's schema takes 1 and "yes" for true."""
    found = read(TEXT, f'{{"model":"m","stream":{stream}}}'.encode())
    assert (expected, expected) == (found.stream, found.usage_added)


def test_a_field_counts_as_the_engine_finds_it():
    """The last of several, and under its name however that is escaped."""
    found = read(CHAT, b'{"model":"a","max_tokens":1,"mod\\u0065l":"b","max_tokens":2}')
    assert ("b", 2, b'{"model":"b","max_tokens":1}') == (found.model, found.max_tokens, found.limited(1).sent)


# ---- how much prompt that is


@pytest.mark.parametrize(
    ("route", "fields", "size", "ids", "media", "prompts"),
    [
        (
            CHAT,
            {"messages": [user("hello"), {"role": "assistant", "content": None, "reasoning": "hm"}]},
            5 + 2,
            0,
            0,
            1,
        ),
        (
            CHAT,
            {
                "messages": [
                    user([{"type": "text", "text": "hello"}, IMAGE, {"type": "input_audio", "input_audio": {}}])
                ]
            },
            5,
            0,
            2,
            1,
        ),
        (CHAT, {"messages": [user([{"type": "image_url", "image_url": None}, "hello"])]}, 5, 0, 0, 1),
        (CHAT, {"messages": [user('a\n"b"')]}, 5, 0, 0, 1),
        (CHAT, {"messages": [user("日本語")]}, 9, 0, 0, 1),
        (
            CHAT,
            {"messages": [user("hi")], "tools": [{"a": "b"}], "metadata": "x" * 99},
            2 + len('[{"a": "b"}]'),
            0,
            0,
            1,
        ),
        (CHAT, {"messages": "hello"}, 5, 0, 0, 1),
        (CHAT, {"messages": [{"role": "poet", "content": "hi", "name": "Ann"}]}, 4 + 2 + 3, 0, 0, 1),
        (
            CHAT,
            {"messages": [user("a")] * (prompt_size.FEW_MESSAGES + 2)},
            prompt_size.FEW_MESSAGES + 2 + 2 * prompt_size.MESSAGE_BYTES,
            0,
            0,
            1,
        ),
        (CHAT, {"messages": [1, None, [], {}, user(3), user({"text": "hi"})]}, 2, 0, 0, 1),
        (CHAT, {"prompt": "not of this route"}, 0, 0, 0, 1),
        (BATCH, {"messages": [[user("one")], [user([{"text": "two"}, IMAGE])]]}, 6, 0, 1, 2),
        (TEXT, {"prompt": "hello", "suffix": "!"}, 6, 0, 0, 1),
        (TEXT, {"prompt": ["hello", "you"]}, 8, 0, 0, 2),
        (TEXT, {"prompt": [1, 22, 333]}, 0, 3, 0, 1),
        (TEXT, {"prompt": [[1, 22], [333], [4, 5, 6]]}, 0, 6, 0, 3),
        (TEXT, {"prompt": [1, "two", 3.5]}, 0, 3, 0, 1),
        (TEXT, {"prompt_embeds": "QUJD"}, 0, 0, 1, 1),
        (RESPONSES, {"instructions": "be", "input": "hello", "tools": []}, 9, 0, 0, 1),
        (
            RESPONSES,
            {
                "input": [
                    user("a"),
                    user([{"type": "input_text", "text": "bc"}, {"type": "input_image", "image_url": "http://x"}]),
                    {"type": "function_call", "arguments": "{}"},
                    {"type": "function_call_output", "output": "four"},
                    {"type": "reasoning", "summary": [{"text": "five5"}]},
                ]
            },
            14,
            0,
            1,
            1,
        ),
        (
            MESSAGES,
            {
                "system": [{"type": "text", "text": "be"}],
                "messages": [
                    user(
                        [
                            {
                                "type": "tool_result",
                                "content": [
                                    {"type": "text", "text": "hello"},
                                    {"type": "image", "source": {"data": "AAAA"}},
                                ],
                            }
                        ]
                    )
                ],
            },
            7,
            0,
            1,
            1,
        ),
        (EMBEDDINGS, {"input": ["hello", "you"]}, 8, 0, 0, 2),
        (EMBEDDINGS, {"input": [[1, 2], [3]]}, 0, 3, 0, 2),
        (EMBEDDINGS, {"messages": [user("hello"), user("you")]}, 8, 0, 0, 1),
        (RERANK, {"query": "abc", "documents": ["hello", {"content": [{"text": "you"}, IMAGE]}]}, 3 * 2 + 8, 0, 1, 2),
        (SCORE, {"text_1": "abc", "text_2": ["hello", "you"]}, 3 * 2 + 8, 0, 0, 2),
        (SCORE, {"queries": ["abc", "d"], "documents": ["hello", "you"]}, 12, 0, 0, 2),
        (DECISIONS, {"input": "hello", "questions": QUESTIONS}, 2 * 5 + QUESTION_BYTES, 0, 0, 2),
        (DECISIONS, {"input": [user("hello")], "questions": QUESTIONS}, 2 * 5 + QUESTION_BYTES, 0, 0, 2),
        (
            DECISIONS,
            {"input": [user("you"), user([{"type": "input_text", "text": "hello"}])], "questions": QUESTIONS},
            2 * 8 + QUESTION_BYTES,
            0,
            0,
            2,
        ),
        (
            SYSTEM_ONE,
            {"state": {"a": 1}, "questions": {}, "instructions": "be", "images": ["AAAA"]},
            len('{"a": 1}{}') + 2,
            0,
            1,
            1,
        ),
    ],
)
def test_prompts_are_measured_where_they_lie(
    route: str, fields: dict[str, Any], size: int, ids: int, media: int, prompts: int
):
    found = read(route, json.dumps(fields, ensure_ascii=False).encode())
    assert (size, ids, media, prompts) == (found.prompt_bytes, found.prompt_ids, found.media, found.prompts)


@given(st.text(st.sampled_from('abc xyz.,:{}[]"\n\té日😀'), min_size=1), st.booleans())
def test_text_size_hardly_depends_on_escapes(text: str, ascii_only: bool):
    """Exact for plain JSON; where a client escapes all but ASCII, the worst case is a little of it in much ASCII."""
    text = text * 5
    found = read(CHAT, json.dumps({"messages": [user(text)]}, ensure_ascii=ascii_only).encode())
    exact = len(text.encode())
    assert exact <= found.prompt_bytes <= (2.5 * exact if ascii_only else exact)


def test_escaped_script_is_no_longer_than_plain():
    """Escaped text of another script is no longer than the plain one."""
    text = "日本語の文章を処理する。" * 100
    plain, escaped = (
        read(CHAT, json.dumps({"messages": [user(text)]}, ensure_ascii=only).encode()) for only in (False, True)
    )
    assert plain.prompt_bytes == escaped.prompt_bytes == len(text.encode())


def test_a_prompt_that_the_engine_may_cut_is_marked():
    assert asked(EMBEDDINGS, truncate_prompt_tokens=-1).truncates
    assert asked(RESPONSES, truncation="auto").truncates
    assert not asked(RESPONSES, truncation="disabled").truncates
    assert not asked(CHAT).truncates


# ---- what is changed


def test_without_a_change_the_very_bytes_pass():
    for route, body in ((CHAT, b'{ "model":"m", "max_tokens":5 }'), (RESPONSES, b'{"stream": true }'),
        (CHAT, b"{not json"), (CHAT, b'"text"'),
                        (CHAT, b""), (CHAT, b"{}"), (EMBEDDINGS, b'{"input":"a"}'),
                        (AUDIO, b"--form\r\n")):  # fmt: skip
        found = read(route, body)
        assert body is found.body is found.sent
        unlimited = found.renamed(None).renamed(found.model)
        assert found is (unlimited if found.max_tokens is None else unlimited.limited(10**6))


def test_changes_keep_order_and_bytes_of_all_else():
    body = (
        b'{ "stream":true, "model" : "m", "seed":12345678901234567890123, "x":[ 1.0, "\\u00e9" ], "max_tokens":99,'
        b' "temperature":1.0 }'
    )
    found = read(CHAT, body).limited(5).renamed('served "é"')
    want = (
        '{"stream":true,"model":"served \\"é\\"","seed":12345678901234567890123,"x":[ 1.0, "\\u00e9"'
        ' ],"max_tokens":5,"temperature":1.0,"stream_options":{"include_usage":true}}'
    )
    assert (want, 5, 'served "é"', True) == (found.sent.decode(), found.max_tokens, found.model, found.usage_added)


@pytest.mark.parametrize(
    ("asked_for", "best", "priority", "said"),
    [
        ({}, 0, 0, {}),
        ({}, 5, 5, {"priority": 5}),
        ({"priority": 0}, 0, 0, {}),
        ({"priority": 7}, 5, 7, {}),
        ({"priority": 4}, 5, 5, {"priority": 5}),
        ({"priority": -1}, 0, 0, {"priority": 0}),
        ({"priority": "-1"}, 0, 0, {"priority": "0"}),
        ({"priority": "0-50"}, 0, 0, {"priority": "0"}),
        ({"priority": "-" + "0" * 4400 + "50"}, 0, 0, {"priority": "0"}),
        ({"priority": -1.0}, 0, 0, {"priority": 0.0}),
        ({"priority": "7"}, 5, 7, {}),
        ({"priority": -7}, -9, -7, {}),
        ({"priority": True}, 0, 1, {}),
        ({"priority": False}, 3, 3, {"priority": 3}),
        ({"priority": 2**63 - 1}, 3, 2**63 - 1, {}),
        # what the engine refuses
        ({"priority": None}, 3, 3, {}),
        ({"priority": [-1]}, 3, 3, {}),
        ({"priority": "x"}, 3, 3, {}),
        ({"priority": 1.5}, 3, 3, {}),
        ({"priority": -(10**30)}, 3, 3, {}),
    ],
)
def test_nobody_gets_ahead_of_the_best_priority_of_its_band(
    asked_for: dict[str, Any], best: int, priority: int, said: dict[str, Any]
):
    """However it spells that; what the engine would refuse it gets, and refuses."""
    fields = {"model": "m", **asked_for}
    found = asked(CHAT, **fields)
    assert priority == found.priority(best)
    assert repr(fields | said) == repr(json.loads(found.ranked(best).sent))
    assert (found is found.ranked(best)) == (not said)


def test_a_body_without_a_field_for_it_keeps_its_bytes():
    for route, body in ((MESSAGES, b'{ "priority":-1 }'), (AUDIO, b"--form\r\n")):
        assert body is read(route, body).ranked(3).sent


@pytest.mark.parametrize(
    ("route", "fields", "most", "changed"),
    [
        (CHAT, {}, 10, {"max_completion_tokens": 10}),
        (CHAT, {"max_tokens": 10}, 10, {}),
        (CHAT, {"max_tokens": 11}, 10, {"max_tokens": 10}),
        (CHAT, {"max_tokens": "11"}, 10, {"max_tokens": "10"}),
        (CHAT, {"max_tokens": 11.0}, 10, {"max_tokens": 10.0}),
        (TEXT, {"max_tokens": 9, "max_output_tokens": -1}, 10, {"max_output_tokens": 10}),
        (TEXT, {"max_tokens": 9, "max_output_tokens": "0" * 70_000 + "99"}, 10, {"max_output_tokens": 10}),
        (CHAT, {"max_completion_tokens": 0}, 10, {"max_tokens": 10}),
        (CHAT, {"max_tokens": 99, "max_completion_tokens": 11}, 10, {"max_tokens": 10, "max_completion_tokens": 10}),
        (CHAT, {"max_tokens": 9, "max_output_tokens": 11}, 10, {"max_output_tokens": 10}),
        (CHAT, {"max_tokens": 11, "max_completion_tokens": 0}, 10, {"max_tokens": 10}),
        (
            TEXT,
            {"max_tokens": 9, "max_completion_tokens": "11", "max_output_tokens": None},
            10,
            {"max_completion_tokens": "10"},
        ),
        (CHAT, {"max_tokens": 99, "max_completion_tokens": None}, 10, {"max_tokens": 10}),
        (CHAT, {"max_tokens": None}, 10, {"max_completion_tokens": 10}),
        (CHAT, {"max_tokens": 10**30}, 10, {"max_tokens": 10}),
        (BATCH, {}, 10, {"max_completion_tokens": 10}),
        (TEXT, {}, 16, {}),
        (TEXT, {}, 15, {"max_tokens": 15}),
        (TEXT, {"max_tokens": None}, 99, {"max_tokens": 99}),
        (TEXT, {"max_tokens": 0}, 10, {}),
        # and not the 16 of the route raised to 99
        (TEXT, {"max_completion_tokens": 5000}, 99, {"max_completion_tokens": 99}),
        (RESPONSES, {}, 10, {"max_output_tokens": 10}),
        (RESPONSES, {"max_output_tokens": 11}, 10, {"max_output_tokens": 10}),
        (MESSAGES, {"max_tokens": 11}, 10, {"max_tokens": 10}),
        (EMBEDDINGS, {"max_tokens": 11}, 10, {}),
        (RERANK, {}, 10, {}),
        (SYSTEM_ONE, {}, 10, {}),
        (DECISIONS, {"input": "s", "questions": QUESTIONS}, 10, {}),
        ("/v1/models", {"max_tokens": 11}, 10, {}),
    ],
)
def test_a_limit_is_written_where_the_client_wrote_its_own(
    route: str, fields: dict[str, Any], most: int, changed: dict[str, Any]
):
    fields = {"model": "m", **fields}
    limited = asked(route, **fields).limited(most)
    assert repr(fields | changed) == repr(json.loads(limited.sent))
    assert limited is limited.limited(most)


@pytest.mark.parametrize("value", ["-1", "1.5", "1e30", "1e400", '"x"', '""', "[1]", "{}"])
def test_what_is_no_limit_reaches_no_engine(value: str):
    """vLLM refuses it; another engine may take it for no limit at all."""
    body = b'{"max_tokens":%b,"max_output_tokens":%b}' % (value.encode(), value.encode())
    for route in (CHAT, TEXT, MESSAGES):
        with pytest.raises(ValueError, match="max_tokens"):
            read(route, body).limited(10)
    assert json.loads(read(RESPONSES, b'{"max_tokens":%b}' % value.encode()).limited(10).sent)["max_tokens"] in (
        10,
        "10",
    )
    for missing in ({"n": 1}, {"max_tokens": None}):
        with pytest.raises(ValueError, match="max_tokens"):
            asked(MESSAGES, **missing).limited(10)


def test_priority_that_cannot_be_read_reaches_no_engine():
    for value, bests in (
        (-(2**63) - 1, (0, 3)),
        ("0" * 70_000 + "-5", (0, 3)),
        ("x", (3,)),
        (None, (3,)),
        ([1], (3,)),
        (1.5, (3,)),
    ):
        for best in bests:
            with pytest.raises(ValueError, match="priority"):
                asked(CHAT, priority=value).require_priority(best)
    for value, best in (("x", 0), (None, 0), ("0-5", 0), (5, 3), (-1, 3), (2**63, 3)):
        asked(CHAT, priority=value).require_priority(best)
    asked(MESSAGES, priority="x").require_priority(3)


KEYS = st.sampled_from([*prompt_size._HOLDS, "role", "type", "é"]) | st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
FORMS = {path: route.body for path, route in routes.ROUTES.items() if route.body is not None and not route.body.form}
NAMES = sorted(
    {"model", "stream", "stream_options", "n", "best_of", "truncation", "logit_bias", "zz"}.union(
        *(how.prompt + how.against + how.whole + how.media + how.limit for how in FORMS.values())
    )
)
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), JSON, max_size=8)
ROUTES = st.sampled_from([*FORMS, AUDIO, "/v1/models"])


@given(ROUTES, BODIES, st.booleans(), st.none() | st.text(max_size=5))
def test_whatever_is_asked_only_what_must_change_changes(
    route: str, fields: dict[str, Any], ascii_only: bool, model: str | None
):
    body = json.dumps(fields, ensure_ascii=ascii_only).encode()
    found = read(route, body)
    sent = found.renamed(model)
    assert isinstance(found.stream, bool)
    assert min(found.prompt_bytes, found.prompt_ids, found.media, found.outputs, found.prompts - 1) >= 0
    assert found.prompt_bytes <= len(body) * found.prompts
    want = fields.copy()
    if found.usage_added:
        options = dict(fields.get("stream_options") or {})
        options.pop("continuous_usage_stats", None)
        want["stream_options"] = options | {"include_usage": True}
    if model is not None and fields:
        want["model"] = model
    assert want == json.loads(sent.sent)
    assert [*want] == [*json.loads(sent.sent)]
    assert want != fields or body is sent.sent


@given(
    ROUTES,
    st.binary()
    | BODIES.map(lambda fields: json.dumps(fields).encode()[:-1])
    | JSON.map(lambda value: json.dumps([value]).encode()),
)
def test_what_is_no_json_object_passes_untouched(route: str, body: bytes):
    found = read(route, body)
    if found.stream is None:
        assert body is found.limited(1).renamed("x").sent
        assert found.model is found.max_tokens is None
    else:
        assert isinstance(json.loads(body), dict)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_what_pythons_parser_reads_is_read(encoding: str):
    """vLLM reads bodies with it. The engine gets the client's encoding and numbers, whatever is added."""
    text = r'{"stream":true,"model":"m","a":[NaN,-Infinity,{"b":Infinity}],"c":"NaN \ud800 \ud83d\ude00 \\ud800 é",'
    text += '"\\ud800\\udbff\\udc00\\uDFFF":1,"max_tokens":9}'
    found = read(CHAT, text.encode(encoding))
    assert ("m", True, 9) == (found.model, found.stream, found.max_tokens)
    for asked_for, changed in ((found, {}), (found.limited(5).salted("s"), {"max_tokens": 5, "cache_salt": "s"})):
        want = json.loads(text) | {"stream_options": {"include_usage": True}} | changed
        assert repr(want) == repr(json.loads(asked_for.sent))
    untouched = read(MESSAGES, text.encode(encoding))
    assert untouched.body is untouched.sent


def test_no_client_can_write_what_stands_for_its_numbers():
    """It would be restored as half of an escape, in the name of a field that nothing here has checked."""
    mark = to_strict(b'{"a":NaN}')[1].partition(" ")[2]
    body = b'{"stream":true,"a":NaN,"%b0":"%bx006dodel"}' % (mark.encode(), mark.encode())
    assert {f"{mark}0": f"{mark}x006dodel"}.items() <= json.loads(read(CHAT, body).sent).items()


@pytest.mark.parametrize("body", [b'{"a":NaN,}', b"\xff\xfe{", b'{"a":' + b"[" * 10**6 + b"}"])
def test_of_what_cannot_be_read_nothing_is_known(body: bytes):
    assert TokenRequest(body=body) == read(CHAT, body)


def test_only_options_that_the_engine_takes_are_completed():
    """stream_options that it refuses it gets, and refuses."""
    refused = """ "x" [] 1 true {"include_usage":"maybe"} {"include_usage":2} {"include_usage":[]}
        {"continuous_usage_stats":"x"} """
    for options in refused.split():
        body = b'{ "stream":true, "stream_options":%b }' % options.encode()
        assert body is read(CHAT, body).sent
    for usage, want in ((False, True), (None, True), (0, 1), (0.0, 1.0), ("no", "True")):
        options = {"include_usage": usage, "continuous_usage_stats": "y", "x": 1}
        sent = json.loads(asked(CHAT, stream=True, stream_options=options).sent)["stream_options"]
        assert {"x": 1, "include_usage": want} == sent
        assert type(want) is type(sent["include_usage"])


def test_a_form_with_a_file_is_one_medium():
    assert TokenRequest(body=b"--form", media=1) == read(AUDIO, b"--form")


# ---- how much memory that takes

MIB = 1 << 20
HOSTILE = {
    "many fields": b"{" + b",".join(b'"%x":0' % i for i in range(400_000)) + b"}",
    "many messages": b'{"messages":[' + b"{}," * (4 * MIB // 3) + b"{}]}",
    "many parts": b'{"messages":[{"content":[' + b'"",' * (4 * MIB // 3) + b'""]}]}',
    "fields of one message": b'{"messages":[{' + b",".join(b'"%x":0' % i for i in range(400_000)) + b"}]}",
    "numbers that are no ids": b'{"messages":[' + b"0," * (2 * MIB) + b"0.5]}",
    "nested": b'{"messages":' + b'{"content":' * 400 + b'"' + b"x" * 4 * MIB + b'"' + b"}" * 400 + b"}",
    "options": b'{"stream":true,"stream_options":{' + b",".join(b'"%x":0' % i for i in range(400_000)) + b"}}",
    "lone surrogates": b'{"a":NaN,"messages":[' + b'"\\ud800",' * (MIB // 3) + b'""]}',
    "a string without an end": b'{"a":NaN,"' + b'\\"' * (MIB // 2),
    "rows of ids": b'{"logprob_token_ids":[' + b"[]," * MIB + b"[1]]}",
    "a vast model": b'{"model":[' + b"[]," * MIB + b"[]]}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_no_body_grows_in_memory(body: bytes):
    """An object for each of the pieces would be 20 to 60 times as large as the body."""
    tracemalloc.start()
    try:
        read(CHAT, body)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()


def test_a_large_prompt_is_measured_and_not_taken_apart():
    """Also where it has more commas than any list may have pieces, as a table has; what is a list of texts counts no
    fewer than it has."""
    text = "1,2,3;" * 700_000
    assert len(text) <= asked(CHAT, messages=[user(text)]).prompt_bytes <= len(text) + 40
    ids = asked(TEXT, prompt=[7] * 600_000)
    assert (600_000, 1) == (ids.prompt_ids, ids.prompts)
    many = asked(TEXT, prompt=["a,b"] * 150_000)
    assert (150_000, True) == (many.prompts, many.prompt_bytes >= 450_000)
    picture = asked(
        CHAT,
        messages=[
            user([{"type": "image_url", "image_url": {"url": "A" * 3 * MIB}}, {"type": "text", "text": "what?"}])
        ],
    )
    assert (5, 1) == (picture.prompt_bytes, picture.media)


# ---- estimates


def of(prompt_bytes: int = 0, **known: Any) -> TokenRequest:
    return TokenRequest(body=b"", prompt_bytes=prompt_bytes, **known)


def test_a_cold_start_is_four_bytes_a_token():
    cold = Estimator()
    assert (BYTES_PER_TOKEN, 251, 0) == (cold.bytes_per_token("m"), cold.prompt("m", of(1001)), cold.prompt(None, of()))
    assert 7 + 2 * MEDIA_TOKENS == cold.prompt("m", of(prompt_ids=7, media=2))


@pytest.mark.parametrize("bytes_per_token", [1.4, 2.9, 4.7, 9.0])
def test_fifty_answers_teach_a_tokenizer(bytes_per_token: float):
    """Prompts of very different lengths, each with the chat template's tokens and text of its own density: less than a
    tenth off in the end."""
    chance, estimator = random.Random(1), Estimator()
    template = 12

    def counted(size: int) -> int:
        return template + round(size / (bytes_per_token * chance.uniform(0.85, 1.15)))

    for _ in range(50):
        size = round(chance.lognormvariate(8, 1))
        estimator.learn("m", of(size), counted(size))
    sizes = [round(chance.lognormvariate(8, 1)) for _ in range(500)]
    assert sum(counted(size) for size in sizes) == pytest.approx(
        sum(estimator.prompt("m", of(size)) for size in sizes), rel=0.1
    )
    assert BYTES_PER_TOKEN == estimator.bytes_per_token("other")


def test_prompts_of_one_team_move_no_other_estimate():
    """22 answers of a team with a token for each byte: a team with answers of its own keeps its estimate, and a new one
    moves by one vote."""
    estimator = Estimator()
    for _ in range(60):
        estimator.learn("m", of(4000), 1000, "b")
    for _ in range(22):
        estimator.learn("m", of(4000), 4000, "a")
    assert 1000 == pytest.approx(estimator.prompt("m", of(4000), "b"), abs=1)
    assert estimator.prompt("m", of(4000), "a") > 3500
    assert estimator.prompt("m", of(4000), "new") < 2000
    assert estimator.prompt("other", of(4000), "a") == 1000


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**6), st.integers(0, 10**7)), max_size=60),
    st.integers(0, 10**6),
)
def test_nothing_that_was_learned_moves_what_is_certain(answers: list[tuple[str, int, int]], size: int):
    estimator = Estimator()
    certain = estimator.certain(of(size))
    for team, prompt_bytes, tokens in answers:
        estimator.learn("m", of(prompt_bytes), tokens, team)
    assert certain == estimator.certain(of(size)) <= estimator.prompt("m", of(size), "a")


def test_what_says_nothing_about_text_teaches_nothing():
    estimator = Estimator()
    for ask, tokens in (
        (of(100), 90),
        (of(9000, media=1), 9000),
        (of(9000, prompt_ids=5), 9000),
        (of(9000), 0),
        (of(9000), -1),
        (of(), 9),
    ):
        estimator.learn("m", ask, tokens)
    assert BYTES_PER_TOKEN == estimator.bytes_per_token("m")


@given(st.lists(st.tuples(st.integers(0, 10**8), st.integers(-5, 10**12)), max_size=60))
def test_no_answer_moves_the_estimate_out_of_its_bounds(answers: list[tuple[int, int]]):
    estimator = Estimator()
    for size, tokens in answers:
        estimator.learn("m", of(size), tokens)
    assert LEAST_BYTES - 1e-9 <= estimator.bytes_per_token("m") <= MOST_BYTES + 1e-9


def test_longest_prompt_is_not_overestimated():
    """The longest prompt is never thought longer than it can be."""
    estimator = Estimator()
    cases = [
        (of(12_000), 1000),
        (of(12_000, maybe_bytes=6_000), 500),
        (of(12_000, prompts=4), 250),
        (of(prompt_ids=50), 50),
    ]
    for ask, least in (*cases, (of(12_000, truncates=True), 0), (of(media=3), 0)):
        assert least == estimator.at_least(estimator.prompt("m", ask), ask)


def test_the_output_of_a_team_is_what_nine_of_ten_got():
    """Over by less than twice, and never more than was asked for; two answers are enough of a hint downwards only after
    some more."""
    estimator = Estimator()
    assert OUTPUT_TOKENS == estimator.output("t", of())
    for number in range(100):
        estimator.learn_output("t", of(), 3000 if number % 20 == 0 else 60)
    assert 64 == estimator.output("t", of())
    assert (20, 0) == (estimator.output("t", of(max_tokens=20)), estimator.output("t", of(max_tokens=0)))
    assert (6 * 64, 0) == (estimator.output("t", of(outputs=6)), estimator.output("t", of(outputs=0)))
    assert OUTPUT_TOKENS == estimator.output("other", of())


def test_the_output_of_several_texts_counts_as_one_each():
    estimator = Estimator()
    for _ in range(50):
        estimator.learn_output("t", of(outputs=4), 400)
    estimator.learn_output("t", of(outputs=0), 400)
    assert 128 == estimator.output("t", of())


def test_longer_answers_are_believed_soon_and_old_ones_forgotten():
    outputs = Outputs()
    for _ in range(300):
        outputs.add(50)
    for _ in range(20):
        outputs.add(5000)
    assert 8192 == outputs.covering(0.9)


@given(st.lists(st.integers(0, 10**12), max_size=90), st.floats(0.01, 1))
def test_a_quantile_is_within_twice_of_something_seen(tokens: list[int], share: float):
    outputs = Outputs()
    for number in tokens:
        outputs.add(number)
    seen = [OUTPUT_TOKENS, *tokens]
    assert min(2**31, *seen) <= outputs.covering(share) <= 2 * max(1, *seen)


def test_names_from_clients_are_bounded():
    estimator = Estimator()
    for number in range(2 * MOST_PAIRS):
        estimator.learn(f"m{number}", of(1000), 500)
        estimator.learn("busy", of(1000), 500)
        estimator.learn_output(f"t{number}", of(), 5)
        estimator.prompt(f"asked{number}", of(1000))
        estimator.output(f"asked{number}", of())
        estimator.note_overrun(f"m{number}", "t", float(number))
    estimator.learn("x" * (LONGEST_NAME + 1), of(1000), 500)
    estimator.learn_output("x" * (LONGEST_NAME + 1), of(), 5)
    assert (MOST_PAIRS, MOST_PAIRS, MOST_NAMES) == (
        len(estimator._tokens_per_byte),
        len(estimator._votes),
        len(estimator._outputs),
    )
    assert MOST_PAIRS == len(estimator._overruns)
    assert 2 == pytest.approx(estimator.bytes_per_token("busy"))
    assert BYTES_PER_TOKEN == estimator.bytes_per_token("m0")


def test_text_of_a_field():
    request = asked(CHAT, model="m", n=2)
    assert ("m", None, None) == (request.text("model"), request.text("n"), request.text("absent"))


@pytest.mark.parametrize(("lists", "counted"), [(4, 10), (5, 14), (8, 20)])
def test_lists_too_deep_to_be_parts_are_text(lists, counted):
    """Beyond four, the JSON itself is what an engine could see."""
    size = prompt_size.PromptSize(dense=False)
    size.add(msgspec.Raw(("[" * lists + '"xxxxxxxxxx"' + "]" * lists).encode()))
    assert counted == size.text_bytes()


@pytest.mark.parametrize(("ids", "counted"), [(10, True), (9, False)])
def test_longer_of_token_ids_and_text_counts(ids, counted):
    """Of 40 bytes of text, ten ids are as much."""
    size = prompt_size.PromptSize(dense=False)
    size.add(msgspec.Raw(b'"' + b"x" * 40 + b'"'))
    field = token_requests.TRANSFERS[0]
    size.add_transferred({field: msgspec.Raw(json.dumps({"prompt_token_ids": [7] * ids}).encode())})
    assert (ids if counted else 0, 0 if counted else 40) == (size.ids, size.text_bytes())


@pytest.mark.parametrize(("parts", "counted"), [(4, 10), (5, 37), (8, 112)])
def test_parts_too_deep_are_text(parts, counted):
    """A part within four others is counted as the JSON that it is."""
    size = prompt_size.PromptSize(dense=False)
    value = '"xxxxxxxxxx"'
    for _ in range(parts):
        value = '[{"type":"t","content":' + value + "}]"
    size.add(msgspec.Raw(value.encode()))
    assert counted == size.text_bytes()

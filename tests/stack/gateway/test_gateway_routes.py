"""Routes of vLLM: served or refused with a reason, read in their own form, and answered in the dialect of their API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stack.gateway import routes
from stack.gateway.bad_body import without_ours
from stack.gateway.reply import Reply
from stack.gateway.request_body import read
from stack.gateway.sse import Scanner
from tests.support.gateway_scene import ASK, CHAT, KEYS, event, gateway, says

LISTED = [
    line.split()
    for line in Path(__file__)
    .with_name("vllm-0.32.0-routes.txt")
    .read_text()
    .replace("{response_id}", "r1")
    .splitlines()
]
GENERATE, LABELS, COHERE = "/inference/v1/generate", "/generative_scoring", "/cohere/v2/chat"


@pytest.mark.parametrize(("method", "path"), sorted({(method, path) for method, path, _ in LISTED}))
def test_each_route_of_vllm_is_served_or_refused(method: str, path: str):
    """Pages for monitoring stand beside the table: they need no key."""
    route = routes.find(path)
    assert route is not routes.OTHER_ROUTE or path in ("/metrics", "/health")
    assert route.refused or path in ("/metrics", "/health") or method in route.methods


@pytest.mark.parametrize(
    ("route", "body", "prompts", "ids", "text", "outputs", "most"),
    [
        (GENERATE, {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 7, "n": 2}}, 1, 3, 0, 2, 7),
        (GENERATE, {"token_ids": [1], "sampling_params": {}}, 1, 1, 0, 1, None),
        (GENERATE, {"token_ids": [1], "max_tokens": 7}, 1, 1, 0, 1, None),
        (LABELS, {"query": "abc", "items": ["d", "ef"], "label_token_ids": [1]}, 2, 0, 9, 2, 1),
        (LABELS, {"query": [1, 2, 3], "items": [[4], [5]]}, 2, 8, 0, 2, 1),
        (LABELS, {"query": ["1", "2", "3"], "items": ["d", "e"]}, 2, 6, 2, 2, 1),
        (GENERATE, {"token_ids": ["1", "2", "3"], "sampling_params": {}}, 1, 3, 0, 1, None),
        ("/classify", {"input": ["ab", "c"]}, 2, 0, 3, 0, 0),
        ("/pooling", {"data": {"image": "abc"}, "task": "plugin"}, 1, 0, 3, 0, 0),
        ("/v2/embed", {"texts": ["ab", "c"], "max_tokens": 9}, 2, 0, 3, 0, 0),
        ("/v2/embed", {"images": ["ab", "c"]}, 2, 0, 0, 0, 0),
        ("/v2/rerank", {"query": "abc", "documents": ["d", "e"]}, 2, 0, 8, 0, 0),
        (COHERE, {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}, 1, 0, 3, 1, 5),
    ],
)
def test_a_body_is_read_in_the_form_of_its_route(
    route: str, body: Any, prompts: int, ids: int, text: int, outputs: int, most: int | None
):
    ask = read(route, json.dumps(body).encode())
    assert (prompts, ids, text, outputs, most) == (
        ask.prompts, ask.prompt_ids, ask.prompt_bytes, ask.outputs, ask.max_tokens
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"max_tokens": 100, "n": 2}, {"max_tokens": 5, "n": 2}),
        ({"max_tokens": "4"}, {"max_tokens": "4"}),
        ({}, {"max_tokens": 5}),
        (None, None),  # the engine refuses it, and so it stays
        ([], []),
    ],
)
def test_a_limit_holds_within_sampling_params(settings: Any, sent: Any):
    body = {"token_ids": [1], "sampling_params": settings}
    assert body | {"sampling_params": sent} == json.loads(read(GENERATE, json.dumps(body).encode()).limited(5).sent)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (GENERATE, {"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}}}}),
        (GENERATE, {"vllm_xargs": {}, "sampling_params": {"extra_args": {"kv_transfer_params": {}}}}),
        (GENERATE, {"token_ids": [1], "ec_transfer_params": {}}),
        (CHAT, {"messages": [], "vllm_xargs": {"kv_transfer_params": "x"}}),
    ],
)
def test_a_transfer_is_found_where_the_engine_takes_it(route: str, body: Any):
    assert read(route, json.dumps(body).encode()).transfer in ("kv_transfer_params", "ec_transfer_params")


@pytest.mark.parametrize(
    ("route", "body", "cut"),
    [
        ("/v2/embed", {"texts": ["a"]}, True),
        ("/v2/embed", {"texts": ["a"], "truncate": "NONE"}, False),
        ("/rerank", {"documents": ["a"], "max_tokens_per_doc": 9}, True),
        ("/rerank", {"documents": ["a"], "max_tokens_per_doc": 0}, False),
        ("/classify", {"input": "a", "truncate_prompt_tokens": -1}, True),
        ("/classify", {"input": "a", "truncate_prompt_tokens": None}, False),
    ],
)
def test_a_prompt_that_the_engine_cuts_is_not_too_long(route: str, body: Any, cut: bool):
    assert cut is read(route, json.dumps(body).encode()).truncates


def test_added_fields_leave_every_byte_of_the_client():
    body = b'{ "model" : "m",\n "messages": [] , "stream":true }\n'
    ask = read(CHAT, body).salted("s").ranked(3)
    assert body[:-2] + b',"stream_options":{"include_usage":true},"cache_salt":"s","priority":3}' == ask.sent
    assert json.loads(ask.renamed("other").sent) == json.loads(ask.sent) | {"model": "other"}


# ---- answers

UNITS = {"input_tokens": 9.0, "output_tokens": 5.0}
SPENT = {"billed_units": UNITS, "tokens": UNITS, "cached_tokens": 4.0}


DEEP: Any = "x"
for _ in range(150):
    DEEP = {"content": [DEEP]}


def units(**counts: int) -> dict[str, Any]:
    return {"embeddings": {}, "meta": {"billed_units": counts}}


@pytest.mark.parametrize(
    ("route", "answer", "counts"),
    [
        (COHERE, {"id": "c", "finish_reason": "MAX_TOKENS", "message": {"content": []}, "usage": SPENT}, (9, 4, 5)),
        ("/v2/embed", units(input_tokens=7, image_tokens=0), (7, None, None)),
        ("/v2/embed", units(input_tokens=0, image_tokens=7), (7, None, None)),
        (LABELS, {"data": [{}], "usage": {"prompt_tokens": 8, "completion_tokens": 2}}, (8, None, 2)),
        ("/classify", {"data": [{}], "usage": {"prompt_tokens": 8, "completion_tokens": 0}}, (8, None, 0)),
        ("/pooling", {"data": "x", "request_id": "r"}, (None, None, None)),
        (GENERATE, {"choices": [{}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, (3, None, 1)),
    ],
)  # fmt: skip
def test_an_answer_is_read_in_the_form_of_its_route(route: str, answer: Any, counts: Any):
    reply = Reply(route)
    reply.read(200, "application/json", json.dumps(answer).encode(), 99)
    assert (None, counts) == (reply.unreadable, (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens))


async def test_token_ids_without_usage_are_the_estimate(tmp_path: Path):
    """The Rust frontend of vLLM 0.32 answers a request for tokens so."""
    choices = [{"index": 0, "token_ids": [7, 8, 9], "finish_reason": "length"}]
    async with gateway(tmp_path, says({"request_id": "r", "choices": choices})) as it:
        async with it.post({"token_ids": [1, 2], "sampling_params": {}}, route=GENERATE):
            pass
        record = await it.record()
    assert ("ok", None, 2, None, 3) == (
        record.outcome, record.prompt_tokens, record.est_prompt_tokens,
        record.completion_tokens, record.est_completion_tokens,
    )  # fmt: skip


def test_a_stream_of_cohere_is_read():
    """As vLLM 0.32 sent it, one event for each token."""
    scanner = Scanner(COHERE)
    text = {"message": {"content": {"text": " bosa"}}}
    for number, each in enumerate(
        (
            {"type": "message-start", "id": "c", "delta": {"message": {"role": "assistant"}}},
            {"type": "content-start", "delta": {"message": {"content": {"text": "", "type": "text"}}}},
            {"type": "content-delta", "delta": text},
            {"type": "content-delta", "delta": text},
            {"type": "content-end", "index": 0, "delta": DEEP},
            {"type": "message-end", "delta": {"finish_reason": "MAX_TOKENS", "usage": SPENT}},
        )
    ):
        scanner.feed(event(**each), float(number))
    reply = scanner.reply
    assert (2, 2.0, True, 9, 4, 5, "length", None) == (
        scanner.content_events, scanner.first_token, scanner.done,
        reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens, reply.finish_reason, reply.unreadable,
    )  # fmt: skip


# ---- errors and ids


async def test_an_unknown_stored_response_is_answered_as_by_vllm(tmp_path: Path):
    policy = {"teams": {team: {"keys": [hashed]} for team, (_, hashed) in KEYS.items()}}
    async with gateway(tmp_path, policy=policy) as it:
        key = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        async with it.session.get(it.started.url + "/v1/responses/resp_x", headers=key) as answer:
            error = (await answer.json())["error"]
    assert (404, "invalid_request_error", "response_id", "not_found") == (
        answer.status, error["type"], error["param"], error["code"]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "status"), [("PUT", CHAT, 405), ("POST", "/sleep", 404), ("GET", "/x", 404)]
)
async def test_a_path_that_is_not_served_has_a_reason(tmp_path: Path, method: str, path: str, status: int):
    async with gateway(tmp_path) as it, it.session.request(method, it.started.url + path) as answer:
        assert (status, status == 405) == (answer.status, "POST" == answer.headers.get("Allow"))
        assert path in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    ("header", "body", "same"),
    [(None, "mine", True), ("other", "mine", False), (None, "two words", False), (None, 7, False)],
)
async def test_the_id_of_a_body_counts_where_no_header_is(tmp_path: Path, header: str | None, body: Any, same: bool):
    async with gateway(tmp_path) as it:
        named = {} if header is None else {"X-Request-Id": header}
        async with it.post(ASK | {"request_id": body}, **named) as answer:
            shown = answer.headers["X-Request-Id"]
        assert same is (shown == body)
        assert shown == (await it.record()).request_id == it.engine.asked[0][2]["x-request-id"]


async def test_an_engine_names_what_leaves_no_record(tmp_path: Path):
    async with gateway(tmp_path) as it:
        async with it.post({"prompt": "x", "request_id": "mine"}, route="/tokenize"):
            pass
        assert "x-request-id" not in it.engine.asked[0][2]


MISSING = "{'type': 'missing', 'loc': 'body.%s', 'msg': 'Field required', 'input': '<dict of %d items>', 'url': 'u'}"


@pytest.mark.parametrize(
    ("place", "count", "left"),
    [
        ("messages", 4, 2),
        ("messages", 5, 3),  # vLLM adds a field of its own first
        ("messages", 3, 3),
        ("EmbeddingCompletionRequest.input", 4, 2),
        ("messages.0.content", 4, 4),
    ],
)
def test_no_validation_error_counts_added_fields(place: str, count: int, left: int):
    error = json.dumps({"error": {"message": MISSING % (place, count)}}).encode()
    assert json.dumps({"error": {"message": MISSING % (place, left)}}).encode() == without_ours(error, 4, 2)


async def test_a_client_sees_the_number_of_its_own_fields(tmp_path: Path):
    """A stream has stream_options added to the three fields of its client."""
    body = {"model": "m", "stream": True, "top_k": 1}
    async with gateway(tmp_path, says({"error": {"message": MISSING % ("messages", 4), "code": 400}}, 400)) as it:
        async with it.post(body) as answer:
            assert MISSING % ("messages", 3) == (await answer.json())["error"]["message"]
        assert 400 == answer.status

"""Generated requests, sent to an engine directly and through the gateway. The answers agree but for a list of known
differences, and each request for tokens leaves a record that agrees with its answer.

Fields and bounds come from the engine's own OpenAPI document. The gateway has several teams, so it writes salts and
ids of responses; one team has a limit and a priority, which are written into its requests too."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from stack.gateway.routes import RECORDED
from stack.lab import plan
from tests.support.differential import (
    JSON,
    Answer,
    Case,
    Client,
    Document,
    Fields,
    differences,
    field_cases,
    odd_bodies,
    with_field,
)
from tests.support.engines import Engines, get
from tests.support.live_gateway import Gate, running
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

MOST = 2  # values of a field that nothing treats specially, by chance
AT_ONCE = 4
POLICY = {
    "teams": {"demo": {}, "held": {"max_output_tokens": 4, "band": "late"}},
    "bands": {"default": {"rank": 1}, "late": {"rank": 1, "engine_priority": 5}},
}
WORDS = {
    "NOTE": '[{"role":"user","content":"the cache"}]',
    "TOOL": '{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}',
    "LIMITS": '0 -1 1 1.5 4.0 "4" "x" "" null true [4] {} 600 1000000000 9223372036854775807 9223372036854775808 1e400'
    ' NaN 4,NAME:3',
    "SALT": "s" * 128, "LONG": "l" * 300, "BIG": "9" * 5000, "RAW": "\a", "SPACE": " ",
}  # fmt: skip
# Valid requests. A greedy choice of tokens makes texts comparable.
GENERATION = r"""
    /v1/chat/completions {"messages": NOTE, "max_tokens": 4, "temperature": 0, "top_k": 1}
    /v1/chat/completions/batch {"messages": [NOTE, NOTE], "max_tokens": 4, "temperature": 0, "top_k": 1}
    /v1/completions {"prompt": "the cache", "max_tokens": 4, "temperature": 0, "top_k": 1}
    /v1/responses {"input": "the cache", "max_output_tokens": 4, "temperature": 0, "top_k": 1}
    /v1/messages {"messages": NOTE, "max_tokens": 4, "temperature": 0, "top_k": 1}
    /inference/v1/generate {"token_ids": [100, 101], "sampling_params": {"max_tokens": 4, "temperature": 0, "top_k": 1}}
    /generative_scoring {"query": "the cache", "items": ["a server", "of"], "label_token_ids": [100, 101]}
    /tokenize {"prompt": "the cache"}
    /detokenize {"tokens": [100, 101]}
    /v1/chat/completions/render {"messages": NOTE}
    /v1/completions/render {"prompt": "the cache"}
    /v1/responses/render {"input": "the cache"}
    /v1/messages/render {"messages": NOTE, "max_tokens": 4}
    /v1/messages/count_tokens {"messages": NOTE}
"""
POOLING = r"""
    /v1/embeddings {"input": "the cache"}
    /v2/embed {"texts": ["the cache"], "embedding_types": ["float"]}
    /pooling {"input": "the cache"}
    /score {"text_1": "the cache", "text_2": ["the cache", "a server"]}
    /v1/score {"queries": "the cache", "documents": ["the cache"]}
    /rerank {"query": "the cache", "documents": ["the cache", "a server"]}
    /v1/rerank {"query": "the cache", "documents": ["the cache"]}
    /v2/rerank {"query": "the cache", "documents": ["the cache"]}
"""
# Values without spaces, of fields that the gateway writes: with and without a stream, and for a team with a limit.
WRITTEN = r"""
    stream_options: "x" [] 1 true null {} {"include_usage":"maybe"} {"include_usage":2} {"include_usage":null}
        {"include_usage":false} {"include_usage":true} {"include_usage":1} {"include_usage":"yes"}
        {"include_usage":[]} {"continuous_usage_stats":"x"} {"continuous_usage_stats":true}
        {"include_usage":true,"continuous_usage_stats":true} {"include_usage":"yes","continuous_usage_stats":"no"}
        {"x":1} {"include_usage":true,"x":[1]} {"include_usage":NaN} "x","stream_options":{}
    cache_salt: "" 123 [] true {} null "x" "SALT" "SALTx" "SPACE" "a\u0000b" "\u0000" "a/b" "a@b" "a\\b" "é" "\ud800"
        "ü","cache_salt":123 NaN
    priority: 0 5 -1 "x" "5" "-1" [1] null true 1.5 5.0 -5.0 9223372036854775807 9223372036854775808
        -9223372036854775808 -9223372036854775809 1e400 NaN 5,"priority":"x" 9007199254740993
    request_id: "abc" "" 5 null [] "a/b" "é" "LONG"
    max_tokens: LIMITS
    max_completion_tokens: LIMITS
    max_output_tokens: LIMITS
"""
SPECIAL = r"""
    n: 0 -1 1 2 3 1.5 2.0 "2" "x" null true [] 16385 1000000000 9223372036854775808 NaN
    best_of: 0 -1 1 3 1.5 "2" "x" null true [] 16385
    model: "none" "" 5 null [] "tiny" "\u0074iny" "tiny","model":"none" "none","model":"tiny" "tiny\u0000" NaN
    stream: true false 1 0 "yes" "no" "maybe" "true" "T" 5 2.0 1.0 0.0 null [] {} "" true,"stream":false
        false,"stream":true NaN
    background: true false null 1 "x"
    store: true false null 1 "x"
    previous_response_id: "resp_none" "" 5 null "x" []
    logit_bias: {"5":-Infinity} {"5":Infinity} {"5":NaN} {"5":1} {"x":1} {"5":"x"} {"9999":1} {"-1":1} [] null "x"
        {"5":-1000}
    temperature: NaN Infinity -Infinity -1 0 1 2.5 "0" "x" null true [] 1e400
    kv_transfer_params: null {} {"do_remote_decode":true} "x" []
    unknown: NaN Infinity -Infinity 1e400 "\ud800" "\udc00\ud800" "\u0000" -0 01 1. .5 +1 "\x" "'" 'x' undefined True
        12345678901234567890123456789012345678901234567890 BIG 1,"unknown":2 {"a":1,"a":2} {"\ud800":1} "RAW"
        1,"\ud800":2 1,"":2 1,"__proto__":{}
    messages: [{"role":"user","content":"\ud800"}] [{"role":"user","content":"\u0000"}]
        [{"role":"user","content":"RAW"}] [{"role":"user","content":[{"type":"text","text":"a"}]}]
        [{"role":"x","content":"a"}] [{"role":"user","content":null}] [{"role":"user"}] [] null "x" {} [[]] [5]
        [{"role":"user","content":"a"},{"role":"assistant","content":"b"}]
        [{"role":"user","content":"a","role":"system"}] [{"role":"user","content":5}] [{"role":"user","content":NaN}]
    prompt: "\ud800" "" [] ["a","b"] [1,2] [[1,2],[3]] [[]] ["a",[1]] [1,"a"] [-1] [99999] 5 null [1.0] ["1"] ["a",""]
        [true] [1e400] {} "RAW"
    input: "\ud800" "" [] ["a","b"] [1,2] [[1,2],[3]] [[]] [1,"a"] [-1] 5 null {} [{"role":"user","content":"a"}]
        [{"type":"message","role":"user","content":[{"type":"input_text","text":"a"}]}] ["a",[1]]
    token_ids: [] [1] [-1] [99999] ["5"] [1.0] [1.5] "x" null [true] {} [[1]] [1e400]
    token_offsets: [[0,1],[1,2]] [] null
    logprobs: 0 1 3 true false null -1 "x" "1" 1000
    top_logprobs: 0 2 -1 null "x" 1000
    prompt_logprobs: 0 1 -1 null "x" 1000 true
    tool_choice: "none" "auto" "required" null "x" {"type":"function","function":{"name":"f"}} {"type":"auto"}
        {"type":"none"} {}
    echo: true false null "x"
    encoding_format: "float" "base64" "bytes" "bytes_only" "x" null 5
"""
TOGETHER = r"""
    /v1/chat/completions: {"n":3} {"n":3,"logprobs":true,"top_logprobs":2} {"tools":[TOOL]}
        {"tools":[TOOL],"tool_choice":"auto"} {"tools":[TOOL],"tool_choice":"none"}
        {"tools":[TOOL],"tool_choice":{"type":"function","function":{"name":"f"}}} {"prompt_logprobs":1}
        {"return_token_ids":true} {"echo":true,"continue_final_message":true,"add_generation_prompt":false}
        {"stop":["a"]} {"logprobs":true,"top_logprobs":3,"return_tokens_as_token_ids":true}
        {"response_format":{"type":"json_object"}} {"seed":5,"temperature":1} {"use_beam_search":true,"n":2}
        {"min_tokens":5} {"best_of":16385} {"tools":[TOOL],"tool_choice":"required"}
    /v1/completions: {"n":3} {"prompt":["a","b"],"n":2} {"prompt":[[1,2],[3]],"logprobs":2} {"echo":true}
        {"echo":true,"logprobs":1,"max_tokens":0} {"logprobs":3} {"prompt_logprobs":2} {"return_token_ids":true}
        {"suffix":"x"} {"best_of":3} {"use_beam_search":true,"n":2}
    /v1/responses: {"tools":[{"type":"function","name":"f","parameters":{}}]}
        {"top_logprobs":2,"include":["message.output_text.logprobs"]} {"instructions":"x"} {"store":true}
        {"store":false} {"reasoning":{"effort":"low"}} {"enable_response_messages":true}
        {"background":true} {"previous_response_id":""} {"logit_bias":{"9999":1}}
    /v1/messages: {"system":"x"} {"tools":[{"name":"f","input_schema":{"type":"object"}}]}
        {"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"any"}}
        {"stop_sequences":["a"]} {"system":[{"type":"text","text":"x"}]}
    /inference/v1/generate: {"sampling_params":{"max_tokens":4,"n":3,"temperature":0}} {"output_mode":"text"}
        {"sampling_params":{"max_tokens":4,"temperature":0,"logprobs":2,"prompt_logprobs":1}}
"""
HEADERS = r"""
    -
    Content-Type: text/plain
    Content-Type: application/json; charset=utf-8
    Content-Type: application/json; charset=latin-1
    Content-Type: APPLICATION/JSON
    Content-Type: application/vnd.api+json
    Content-Type: application/x-www-form-urlencoded
    Content-Type: multipart/form-data; boundary=x
    Content-Type: application
    Content-Type:
    Content-Type: application/json && Content-Type: application/json
    Content-Type: application/json && Content-Type: text/plain
    Content-Type: text/plain && Content-Type: application/json
    User-Agent: a && User-Agent: a
    User-Agent: a && User-Agent: b
    User-Agent: é
    Accept: text/event-stream
    Accept: application/xml
    Accept: a && Accept: b
    Accept-Language: de && Accept-Language: en
    Accept-Encoding: gzip
    Accept-Encoding: identity;q=0
    X-Request-Id: a b
    X-Request-Id: é
    X-Request-Id:
    X-Request-Id: LONG
    X-Request-Id: a && X-Request-Id: b
    X-Request-Id: a/b
    Content-Encoding: identity
    Content-Encoding: gzip
    X-Vllm-Priority: 5
    X-Vllm-Priority: x
    X-Vllm-Priority: 99999999999999999999
    X-data-parallel-rank: 0
    X-data-parallel-rank: 5
    X-data-parallel-rank: x
    X-data-parallel-rank: -1
    X-session-id: x
    Expect: 100-continue
    Expect: x
    X-Unknown: a && X-Unknown: b
    X-Unknown: é
    X_Under_Score: a
    Origin: http://x
    Cookie: a=b && Cookie: c=d
    traceparent: x
    Upgrade: h2c
    Connection: Upgrade, HTTP2-Settings && Upgrade: h2c && HTTP2-Settings: x
    TE: trailers
    X-Forwarded-For: 1.2.3.4 && X-Forwarded-For: 5.6.7.8
    X-Forwarded-Proto: https
    Forwarded: for=1.2.3.4
    If-None-Match: *
    Range: bytes=0-5
    Priority: u=1
    OpenAI-Organization: x
    anthropic-version: 2023-06-01
    X-HTTP-Method-Override: GET
"""
OTHERS = """
    GET:/v1/chat/completions PUT:/v1/chat/completions DELETE:/v1/chat/completions PATCH:/v1/completions
    HEAD:/v1/completions OPTIONS:/v1/completions POST:/v1/completions/ POST:/v1/completions?a=b
    POST://v1/completions POST:/v1/./completions POST:/v1/%63ompletions POST:/V1/completions POST:/v1/none
    POST:/none GET:/v1/models HEAD:/v1/models GET:/v1/models/tiny GET:/v1/models/none POST:/v1/models GET:/version
    GET:/load GET:/ping POST:/ping GET:/health GET:/metrics GET:/openapi.json GET:/docs GET:/tokenizer_info
    GET:/tokenize GET:/v1/responses/resp_none POST:/v1/responses/resp_none/cancel DELETE:/v1/responses/resp_none
    GET:/ GET:/favicon.ico
"""
# Differences that stay, and why: engines (or team) | expression of request and difference | reason.
KNOWN = r"""
    generation|pooling | .* header Content-Type: .+ && .+: status 200 400 | two values are ambiguous
    generation|pooling | .* header Expect: x: status 200 417 | RFC 9110, section 10.1.1
    generation|pooling | .* header Connection: Upgrade.*: status 400 200 | uvicorn loses the body
    generation | .* header X-(Vllm-Priority|data-parallel-rank): .*: status [45]00 200 | the gateway settles both
    generation|pooling | .* header X-Request-Id:( a b| é| LONG)?: names .* | an id unfit for a log is replaced
    generation|pooling | .* request_id="(é?"|l+): names .* | the same of an id in a body
    generation | /v1/messages.* request_id=".*: names .* | the engine has no such field on this route
    pooling | /v2/embed request_id=".*: names .* | the engine has no such field on this route
    generation | /v1/responses .*request_id=".*: names .* | ids of responses carry a tag of their team
    generation | /v1/responses .*with {"background":true}: status 200 400 | nobody would wait for its usage
    generation | /v1/responses stream .*: fields -\['broken off'.* | the client gets an error event
    generation | .*kv_transfer_params=.*: status 200 400 | only for teams with kv_transfer
    generation | .*with {"best_of":16385}: status 200 400 | more texts than the engine makes
    pooling | .* (data_2|documents|items|text_2|messages)=.*: status 200 400 | the engine reads one of two prompts
    pooling | .* (DELETE|PATCH|PUT): status 404 405 | the gateway knows routes that this engine lacks
    generation | /v1/completions/ POST: status 307 400 | served without a redirect; the body is none of this route
    generation|pooling | .* header Content-Encoding: gzip: status 200 415 | no engine decodes a body
    held generation | .*max_.*=(600|[0-9]{10,}): status 400 200 | lowered to the limit of the team
"""
# Arguments of each engine, and the valid requests to it.
KINDS = {
    "generation": (("--enable-scale-out", "--scheduling-policy=priority", "--max-model-len=512"), GENERATION),
    "pooling": (("--runner=pooling", "--convert=embed"), POOLING),
}


@dataclass(frozen=True)
class Exchange:
    case: Case
    direct: Answer
    through: Answer

    def differences(self) -> list[str]:
        exact = b'"temperature"' in self.case.body  # which is 0, or meets a top_k of 1
        shown = differences(self.direct, self.through, exact=exact)
        return [f"{self.case.label}: {difference}" for difference in shown]


def expanded(text: str) -> str:
    for word, meaning in WORDS.items():
        text = text.replace(word, meaning)
    return text


def valid_requests(table: str) -> dict[str, Fields]:
    """Return the fields of the valid request of each path."""
    rows = [row.split(maxsplit=1) for row in expanded(table).splitlines() if row.strip()]
    bodies = {path: {"model": plan.MODEL, **json.loads(body)} for path, body in rows}
    return {path: {name: json.dumps(value) for name, value in body.items()} for path, body in bodies.items()}


def values(table: str) -> dict[str, list[str]]:
    """Return the values behind each name of a table."""
    found: dict[str, list[str]] = {}
    for word in table.replace("LIMITS", WORDS["LIMITS"]).split():
        if word.endswith(":"):
            found[(name := word[:-1])] = []
        else:
            found[name].append(expanded(word.replace("NAME", f'"{name}"')))
    return found


def headers(row: str) -> tuple[tuple[str, str], ...]:
    pairs = [expanded(pair.strip()).partition(":") for pair in row.split("&&") if ":" in pair]
    own = tuple((name, value.strip()) for name, _, value in pairs)
    return own if "Content-Type" in row or not pairs else (*JSON, *own)


def cases(document: Document, valid: dict[str, Fields]) -> Iterator[Case]:
    """Generate all requests of an engine. The first route gets every odd body and header, the others some of each."""
    for number, (path, fields) in enumerate(valid.items()):
        yield Case(path, "valid", with_field(fields).encode())
        special, written = ({} if number else values(SPECIAL)), (values(WRITTEN) if path in RECORDED else {})
        yield from field_cases(document, path, fields, special, written, MOST)
        rows = [row.strip() for row in HEADERS.splitlines() if row.strip()]
        more = [Case(path, f"header {row}", with_field(fields).encode(), headers(row)) for row in rows]
        more += [*odd_bodies(path, fields), Case(path, "HTTP/1.0", with_field(fields).encode())]
        yield from random.Random(path).sample(more, len(more) // 5) if number else more
        for added, stream in itertools.product(values(TOGETHER).get(path, ()), ("", ',"stream":true')):
            body = with_field(fields | {name: json.dumps(value) for name, value in json.loads(added).items()})
            yield Case(path, f"{'stream ' * bool(stream)}with {added}", f"{body[:-1]}{stream}}}".encode())
    for method, _, path in (word.partition(":") for word in OTHERS.split()):
        yield Case(path, method, with_field(next(iter(valid.values()))).encode() * (method == "POST"), method=method)


def exchanges(gate: Gate, team: str, engine: str, sent: list[Case]) -> list[Exchange]:
    """Send each request to both."""
    local = threading.local()

    def exchange(case: Case) -> Exchange:
        if not hasattr(local, "clients"):
            local.clients = Client(engine), Client(gate.url, gate.keys[team])
        name = gate.offer()
        direct, through = (client.send(case, name) for client in local.clients)
        return Exchange(case, direct, through)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(exchange, {case.label: case for case in sent}.values()))


@dataclass(frozen=True)
class Scene:
    """The exchanges of an engine, by group: all of the team without limits, and those of written fields of the other,
    of which only the status counts."""

    gate: Gate
    groups: dict[str, list[Exchange]]


@pytest.fixture(scope="module", params=KINDS)
def scene(request, real_engines: Engines, free_port, tmp_path_factory) -> Iterator[Scene]:
    (arguments, table), folder = KINDS[request.param], tmp_path_factory.mktemp("differential")
    engine = real_engines.own(*arguments, VLLM_ENABLE_RESPONSES_API_STORE="1").up()
    url, valid = engine.spec.address, valid_requests(table)
    document = json.loads(get(f"{url}/openapi.json"))
    recorded = RECORDED & valid.keys()
    written = [each for path in recorded for each in field_cases(document, path, valid[path], values(WRITTEN), {}, 0)]
    with running(
        "alike", folder, POLICY | {"upstreams": {"one": {"url": url}}}, {}, (free_port(), free_port())
    ) as gate:
        eventually(lambda: get(f"{gate.url}/-/ready") == "ready\n", "a ready gateway")
        groups = {
            request.param: exchanges(gate, "demo", url, list(cases(document, valid))),
            f"held {request.param}": exchanges(gate, "held", url, written),
        }
        yield Scene(gate, groups)
    engine.end()


def test_answers_agree_but_for_known_differences(scene):
    for group, sent in scene.groups.items():
        rows = [[part.strip() for part in row.split(" | ")] for row in KNOWN.splitlines() if row.strip()]
        known = {pattern for groups, pattern, _ in rows if re.fullmatch(groups, group)}
        shown = [each for exchange in sent for each in exchange.differences()]
        if group.startswith("held"):
            shown = [each for each in shown if ": status " in each]
        assert [] == [each for each in shown if not any(re.fullmatch(pattern, each) for pattern in known)], group
        assert set() == {pattern for pattern in known if not any(re.fullmatch(pattern, each) for each in shown)}, group


def test_each_request_leaves_a_record_of_its_answer(scene):
    """Of a request whose head cannot be read nothing is known."""
    sent = [exchange for group in scene.groups.values() for exchange in group if exchange.case.path in RECORDED]
    names = Counter(each.through.request_id for each in sent if each.case.method == "POST")
    once = [each.through for each in sent if each.through.request_id and 1 == names[each.through.request_id]]
    records = scene.gate.records([each.request_id for each in once])
    assert [each.status for each in once] == [record.status for record in records]
    counted = [pair for pair in zip(once, records, strict=True) if pair[0].tokens]
    assert len(counted) > 100
    for answer, record in counted:
        assert answer.tokens == (record.prompt_tokens, record.completion_tokens or 0), answer.request_id

"""Every route that an engine here serves, through the gateway. A request for tokens leaves one record, which agrees
with its answer and with the counters of the engine; every other request leaves none.

The engines run one after the other: one generates, one embeds, one is a cross encoder."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exporters.catalogue import vllm
from stack.gateway.routes import ROUTES
from stack.lab import plan
from tests.support import vllm_routes
from tests.support.engines import Engine, Engines, get
from tests.support.live_gateway import IDS, Gate, running
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

FIXTURE = Path(__file__).parents[1] / "stack" / "gateway" / "vllm-0.32.0-routes.txt"
NOTE = '[{"role": "user", "content": "the cache"}]'
TOKENS = list(range(100, 140))
QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 2050}  # it answers decisions
WORDS = {2048: "yes", 2049: "no"}  # that answer a decision
# Audio: no speech model. Cohere: a package that the engine's environment lacks. Decisions: a later release. Cancel:
# of a response in the background, which the gateway refuses. Ready: of vLLM's supervisor of several engines. Stored
# responses have a test of their own.
NOT_HERE = """
    /v1/audio/transcriptions /v1/audio/translations /cohere/v2/chat /cohere/v2/chat/render /v1/decisions
    /v1/responses/{id}/cancel /v1/responses/{id} /ready /readyz
"""
SCORING = """
    /score {"text_1": "the cache", "text_2": ["the cache", "a server of tokens"]}
    /v1/score {"queries": ["the cache", "a server"], "documents": ["the cache", "of tokens"]}
    /rerank {"query": "the cache", "documents": ["the cache", "a server of tokens"]}
    /v1/rerank {"query": "the cache", "documents": ["the cache", "a server of tokens"], "top_n": 1}
    /v2/rerank {"query": "the cache", "documents": ["the cache"]}
"""
COUNTING = """
    /tokenize {"prompt": "the cache"}
    /tokenize {"messages": NOTE}
    /detokenize {"tokens": [100, 101]}
"""
GENERATION = """
    /v1/chat/completions {"messages": NOTE, "max_tokens": 5}
    /v1/chat/completions {"messages": NOTE, "max_tokens": 5, "stream": true}
    /v1/chat/completions {"messages": NOTE, "max_tokens": 5, "n": 3, "stream": true}
    /v1/chat/completions/batch {"messages": [NOTE, NOTE], "max_tokens": 5}
    /v1/completions {"prompt": ["the cache", "a server of tokens"], "max_tokens": 5}
    /v1/completions {"prompt": ["the cache", "a server of tokens"], "max_tokens": 5, "stream": true}
    /v1/completions {"prompt": [[100, 101, 102], [103]], "max_tokens": 5, "n": 2, "stream": true}
    /v1/responses {"input": "the cache", "max_output_tokens": 5}
    /v1/responses {"input": "the cache", "max_output_tokens": 5, "stream": true}
    /v1/messages {"messages": NOTE, "max_tokens": 5}
    /v1/messages {"messages": NOTE, "max_tokens": 5, "stream": true}
    /inference/v1/generate {"token_ids": [100, 101, 102], "sampling_params": {"max_tokens": 5}}
    /inference/v1/generate {"token_ids": [100, 101, 102], "sampling_params": {"max_tokens": 5, "n": 2}}
    /inference/v1/generate {"token_ids": [100, 101, 102], "sampling_params": {"max_tokens": 5}, "stream": true}
    /inference/v1/generate {"token_ids": [100, 101], "sampling_params": {"max_tokens": 5}, "output_mode": "text"}
    /generative_scoring {"query": "the cache", "items": ["a server", "of tokens"], "label_token_ids": [100, 101]}
    /generative_scoring {"query": [100, 101], "items": [[100], [101, 102]], "label_token_ids": [100]}
    /v1/systemone {"state": "slow", "questions": {"q": {"type": "noul", "instructions": "is it slow"}}}
    /v1/systemone {"state": "a", "questions": {"a": {"type": "noul"}, "b": {"type": "choice", "criteria": {"x": null}}}}
"""
GENERATION_PASSED = """
    /v1/chat/completions/render {"messages": NOTE}
    /v1/completions/render {"prompt": ["the cache", "a server of tokens"]}
    /v1/responses/render {"input": "the cache"}
    /v1/messages/render {"messages": NOTE, "max_tokens": 5}
    /v1/messages/count_tokens {"messages": NOTE}
    /v1/completions/derender {"generate_responses": [{"choices": [{"index": 0, "token_ids": [100, 101]}]}]}
    /v1/chat/completions/derender {"generate_response": {"choices": []}, "chat_request": {"messages": []}}
    /ping {}
"""
EMBEDDING = """
    /v1/embeddings {"input": "the cache"}
    /v1/embeddings {"input": ["the cache", "a server of tokens"], "encoding_format": "base64"}
    /v1/embeddings {"input": [[100, 101, 102], [103]], "encoding_format": "bytes"}
    /v1/embeddings {"messages": NOTE}
    /v2/embed {"texts": ["the cache", "a server of tokens"], "embedding_types": ["float", "base64"]}
    /v2/embed {"inputs": [{"content": [{"type": "text", "text": "the cache"}]}]}
    /pooling {"input": ["the cache", "a server of tokens"]}
    /pooling {"input": ["the cache", "a server of tokens"], "task": "embed", "encoding_format": "bytes"}
    /pooling {"messages": NOTE, "task": "embed"}
"""
CLASSES = """
    /classify {"input": ["the cache", "a server of tokens"]}
    /classify {"messages": NOTE}
    /pooling {"input": ["the cache", "a server of tokens"], "task": "classify"}
"""


def requests(table: str) -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of each row."""
    rows = [row.split(maxsplit=1) for row in table.replace("NOTE", NOTE).splitlines() if row.strip()]
    return [(path, json.loads(body)) for path, body in rows]


SERVED = [path for path, route in ROUTES.items() if not route.refused]
READ = [path for path in SERVED if "GET" in ROUTES[path].methods and path not in NOT_HERE.split()]


@dataclass(frozen=True)
class Kind:
    """An engine: its arguments, requests for tokens, requests that leave no record, and paths that are read."""

    arguments: tuple[str, ...]
    recorded: list[tuple[str, dict[str, Any]]]
    passed: list[tuple[str, dict[str, Any]]]
    read: list[str]


KINDS = {
    "generation": Kind(
        ("--enable-scale-out", "--enable-tokenizer-info-endpoint", "--hf-overrides", json.dumps(QWEN)),
        requests(GENERATION), requests(COUNTING + GENERATION_PASSED), READ,
    ),
    "embedding": Kind(
        ("--runner=pooling", "--convert=embed"), requests(EMBEDDING + SCORING), requests(COUNTING), ["/v1/models"]
    ),
    "cross encoder": Kind(
        ("--runner=pooling", "--convert=classify", "--hf-overrides", '{"num_labels": 1}'),
        requests(CLASSES + SCORING), requests(COUNTING), ["/v1/models"],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    metadata: str = ""  # header that describes bytes

    def usage(self) -> tuple[int, int] | None:
        """Return the tokens read and made as the last JSON object with a usage says, None without one."""
        for line in reversed([self.metadata, *self.text.splitlines()]):
            document = json.loads(text) if (text := line.removeprefix("data: ")).startswith("{") else {}
            holders = (document, document.get("response") or {}, document.get("meta") or {})
            for said in (holder.get("usage") or holder.get("billed_units") for holder in holders):
                if said:
                    read, made = (said.get(f"{old}_tokens", said.get(f"{new}_tokens")) for old, new in SIDES)
                    return read, made or 0
        return None


SIDES = (("prompt", "input"), ("completion", "output"))


@dataclass
class Scene:
    """A gateway before an engine of a kind, and the answers to all its requests for tokens."""

    kind: Kind
    engine: Engine
    gate: Gate
    names: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = [0.0, 0.0]
        self.before = self.counted()
        for path, body in self.kind.recorded:
            self.names.append(self.gate.offer())
            self.answers.append(self.ask(path, body, self.names[-1]))

    def ask(self, path: str, body: dict[str, Any] | None = None, name: str = "") -> Answer:
        """Send a body by POST under this request id, or read a path."""
        data = None if body is None else json.dumps({"model": plan.MODEL, **body}).encode()
        headers = {"Authorization": f"Bearer {self.gate.keys['demo']}", "Content-Type": "application/json", IDS: name}
        request = urllib.request.Request(self.gate.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode(errors="replace")
            return Answer(answer.status, text, answer.headers.get("metadata", ""))

    def counted(self) -> list[float]:
        """Return the tokens that the engine has read and made since the scene began."""
        shown = self.engine.shown()
        totals = [shown.total(metric.name) or 0.0 for metric in (vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS)]
        return [now - then for now, then in zip(totals, self.before, strict=True)]


def deciding_tokenizer(model: Path, folder: Path) -> Path:
    """Copy the model's tokenizer and give each of WORDS a token."""
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    known = json.loads(file.read_text())
    first = known["added_tokens"][0] | {"special": False}
    known["added_tokens"] += [first | {"id": number, "content": word} for number, word in WORDS.items()]
    file.write_text(json.dumps(known))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def scene(request, part, real_engines: Engines, free_port, tmp_path_factory) -> Iterator[Scene]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("routes")
    tokenizer = deciding_tokenizer(part("model").path, folder / "tokenizer")
    arguments = *kind.arguments, f"--tokenizer={tokenizer}", "--load-format=dummy"  # the file has no layer for classes
    engine = real_engines.own(*arguments, VLLM_ENABLE_RESPONSES_API_STORE="1").up()
    policy = {"teams": {"demo": {}}, "upstreams": {"one": {"url": engine.spec.address}}}
    with running("routes", folder, policy, {}, (free_port(), free_port())) as gate:
        eventually(lambda: get(f"{gate.url}/-/ready") == "ready\n", "a ready gateway")
        yield Scene(kind, engine, gate)
    engine.end()


def test_fixture_is_what_the_source_declares(part):
    site_packages = next(part("engine").path.parents[1].glob("lib/python*/site-packages"))
    assert FIXTURE.read_text().splitlines() == vllm_routes.routes(site_packages)


def test_every_served_route_is_asked():
    asked = {path for kind in KINDS.values() for path, _ in kind.recorded + kind.passed}
    asked.update(*(kind.read for kind in KINDS.values()))
    assert set(NOT_HERE.split()) == set(SERVED) - asked


def test_each_request_leaves_a_record_of_its_usage(scene):
    records = scene.gate.records(scene.names)
    for (path, body), answer, record in zip(scene.kind.recorded, scene.answers, records, strict=True):
        assert (200, "ok", path) == (answer.status, record.outcome, record.route), body
        recorded = record.prompt_tokens, record.completion_tokens or 0
        assert (answer.usage() or recorded) == recorded, (path, body)
    assert Counter(scene.names) == Counter(record.request_id for record in scene.gate.lines())


def test_log_agrees_with_the_engine_to_the_token(scene):
    """The engine reads a prompt once for each text of it (n), which usage counts once."""
    records = scene.gate.records(scene.names)
    bodies = [body for _, body in scene.kind.recorded]
    texts = [body.get("n") or body.get("sampling_params", {}).get("n") or 1 for body in bodies]
    read = sum(n * record.prompt_tokens for n, record in zip(texts, records, strict=True))
    made = sum(record.completion_tokens or 0 for record in records)
    eventually(lambda: scene.counted() == [read, made], f"a count of {read} and {made}")


def test_other_requests_leave_no_record(scene):
    scene.gate.records(scene.names)
    counted = scene.counted()
    for path, body in [*scene.kind.passed, *((path, None) for path in scene.kind.read)]:
        assert 200 == scene.ask(path, body).status, (path, body)
    assert (len(scene.names), counted) == (len(scene.gate.lines()), scene.counted())


@pytest.mark.parametrize("scene", ["generation"], indirect=True)
def test_stored_response_is_read_without_a_record(scene):
    body = {"input": "the cache", "max_output_tokens": 5}
    stored = json.loads(scene.ask("/v1/responses", body, scene.gate.offer()).text)
    read = json.loads(scene.ask(f"/v1/responses/{stored['id']}").text)
    assert stored["output"] == read["output"]


@pytest.mark.parametrize("scene", ["embedding"], indirect=True)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_bytes_without_usage_have_no_count(scene, path):
    """The reconciliation shows what the engine has read for them."""
    name, before = scene.gate.offer(), scene.counted()
    scene.ask(path, {"input": [TOKENS], "encoding_format": "bytes_only"}, name)
    (record,) = scene.gate.records([name])
    assert ("ok", path, None) == (record.outcome, record.route, record.prompt_tokens)
    eventually(lambda: scene.counted() == [before[0] + len(TOKENS), before[1]], "the engine's count")

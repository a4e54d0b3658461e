"""The gateway's reading of bodies held against vLLM's own request models and prompt parsing, which the engine's Python
runs once for all cases."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from stack.gateway.estimate import Estimator
from stack.gateway.request_body import read
from stack.gateway.routes import find
from tests.support.engines import run_by_engine

pytestmark = pytest.mark.engine

CHAT, BATCH, TEXT, RESPONSES, MESSAGES, EMBEDDINGS, RERANK, SCORE, DECISIONS = V1 = [
    f"/v1/{name}"
    for name in (
        "chat/completions",
        "chat/completions/batch",
        "completions",
        "responses",
        "messages",
        "embeddings",
        "rerank",
        "score",
        "systemone",
    )
]
TOKENS, LABELS, CLASSIFY, POOLING, COHERE = ROOT = [
    "/inference/v1/generate", "/generative_scoring", "/classify", "/pooling", "/v2/embed"
]  # fmt: skip
ROUTES = V1 + ROOT
MODEL_NAME, LONG = "m", "word " * 2000
IDS = [100] * 2000
NOTE = {"role": "user", "content": "x"}


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def part(**fields: Any) -> list[dict[str, Any]]:
    return [message("user", [{"type": "text", "text": "x"}, fields])]


FUNCTION = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "description": LONG}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}
CHAT_MESSAGES = [
    [message("user", LONG)],
    [message("user", [{"type": "text", "text": LONG}])],
    [message("assistant", None, reasoning=LONG), NOTE],
    [message("assistant", "x", tool_calls=[CALL]), NOTE],
    [message("tool", LONG, tool_call_id="1")],
    [message("tool", "x", tool_call_id=LONG)],
    [message("user", "x", name=LONG)],
    [message("developer", "x", tools=[FUNCTION])],
    [message(LONG, "x")],
    [NOTE] * 2000,
    part(type="refusal", refusal=LONG),
    part(type="thinking", thinking=LONG),
]
TEMPLATE = {"chat_template": [LONG], "chat_template_kwargs": [{"notes": LONG}]}
TRANSFERRED = {"kv_transfer_params": [{"prompt_token_ids": IDS}]}
TEXTS = [LONG, [LONG, LONG], ["word"] * 500]
NUMBERS = [
    IDS,
    [100.0] * 1000,
    [100, *["100"] * 1000],
    [*["100"] * 1000, 100],
    [["100"] * 2000],
    [IDS, [True, 1.0, "7"]],
    [[100.0] * 2000],
]
PAIR = {"text_1": "x", "text_2": "y"}

# Every field of vLLM's request models that carries text, token ids or media into the prompt, in every shape of its
# value.
CARRIES: dict[str, dict[str, list[Any]]] = {
    CHAT: {"messages": CHAT_MESSAGES, "tools": [[FUNCTION]], "documents": [[{"text": LONG}]],
        "response_format": [FORMAT],
           "tool_choice": [{"type": "function", "function": {"name": LONG}}], **TEMPLATE, **TRANSFERRED},
    BATCH: {"messages": [[one, [NOTE]] for one in CHAT_MESSAGES], "response_format": [FORMAT], "tool_choice": [],
        "tools": [[FUNCTION]],
            "documents": [[{"text": LONG}]], **TEMPLATE},
            # the last two are no fields, and go on into the request of each conversation
    TEXT: {"prompt": [*TEXTS, *NUMBERS], "suffix": [LONG], "prompt_embeds": ["QUJD"]},
    RESPONSES: {"input": [LONG, [message("user", LONG)],
        [{"type": "function_call", "name": "f", "call_id": "1", "arguments": LONG}],
                          [{"type": "function_call_output", "call_id": "1", "output": LONG}],
                          [message("user", [{"type": "input_text", "text": LONG}])],
                          [{"type": "reasoning", "id": "1", "summary": [{"type": "summary_text", "text": LONG}]}]],
                "instructions": [LONG],
                "previous_input_messages": [[message("user", LONG)],
                    [{"author": {"role": "user"}, "content": [{"text": LONG}]}]],
                "tools": [[{"type": "function", "name": "f", "description": LONG, "parameters": {}, "strict": False}]],
                "tool_choice": [{"type": "function", "name": "f"}],
                "text": [{"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}],
                "chat_template_kwargs": TEMPLATE["chat_template_kwargs"], **TRANSFERRED},
    MESSAGES: {"messages": [[message("user", LONG)], [message("user", [{"type": "text", "text": LONG}])],
                            [message("assistant", [{"type": "thinking", "thinking": LONG}]), NOTE],
                            [message("assistant", [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": LONG}}]),
                                NOTE],
                            [message("assistant", [{"type": "tool_use", "id": "1", "name": LONG, "input": {}}]), NOTE],
                            [message("user", [{"type": "tool_result", "tool_use_id": "1", "content": LONG}])],
                            [message("user", [{"type": "tool_result", "tool_use_id": LONG, "content": "x"}])],
                            # in this role it becomes text as it is, pictures too
                            [message("assistant",
                                [{"type": "tool_result", "content": [{"type": "image", "source": {"data": LONG}}]}]),
                                NOTE],
                            [message("system", [{"type": "tool_addition",
                                "tool": {"type": "tool_definition", "definition": {
                                "name": "f", "description": LONG, "input_schema": {}}}}]), NOTE]],
               "system": [LONG, [{"type": "text", "text": LONG}]],
               "tools": [[{"name": "f", "description": LONG, "input_schema": {}}]],
               "tool_choice": [{"type": "tool", "name": LONG}],
               "output_config": [{"format": {"type": "json_schema", "schema": SCHEMA}}],
               "chat_template_kwargs": TEMPLATE["chat_template_kwargs"], **TRANSFERRED},
    EMBEDDINGS: {"input": [*TEXTS, *NUMBERS, [message("user", LONG)], [[message("user", LONG)], [NOTE]]],
                 "messages": [*CHAT_MESSAGES[:2], [[message("user", LONG)], [NOTE]]], **TEMPLATE},
    RERANK: {"query": [LONG], "documents": [LONG, [LONG, "x"], {"content": [{"type": "text", "text": LONG}]}],
        "instruction": [LONG],
             "chat_template_kwargs": TEMPLATE["chat_template_kwargs"]},
    SCORE: {"text_1": [LONG], "text_2": [LONG, [LONG, "x"]], "queries": [LONG], "documents": [[LONG]],
        "items": [[LONG]], "data_1": [LONG],
            "data_2": [[LONG]], "instruction": [LONG], "chat_template_kwargs": TEMPLATE["chat_template_kwargs"]},
    DECISIONS: {"state": [LONG, {"a": LONG}], "instructions": [LONG],
                "questions": [{"q": {"type": "bool", "instructions": LONG}},
                    {"q": {"type": "bool"}, "p": {"type": "bool"}}],
                "images": [["QUJD"]], "audio": [["QUJD"]], "videos": [["QUJD"]],
                "chat_template_kwargs": TEMPLATE["chat_template_kwargs"]},
    TOKENS: {"token_ids": [IDS, ["100"] * 2000], "features": [], "content_parts": [[{"type": "text", "text": "x"}]]},
    LABELS: {"query": [LONG, IDS, ["100"] * 2000], "items": [[LONG], ["a", LONG], [IDS, [1]]]},
    CLASSIFY: {"input": [*TEXTS, *NUMBERS], "messages": [*CHAT_MESSAGES[:2]], **TEMPLATE},
    POOLING: {"input": [*TEXTS, *NUMBERS], "messages": [*CHAT_MESSAGES[:2]], "data": [{"a": LONG}], **TEMPLATE},
    COHERE: {"texts": [[LONG], ["a", LONG]], "images": [["QUJD", "QUJD"]],
             "inputs": [[{"content": [{"type": "text", "text": LONG}]}] * 2]},
}  # fmt: skip
REST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [NOTE]}, BATCH: {"messages": [[NOTE]]}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"},
    MESSAGES: {"model": "m", "messages": [NOTE], "max_tokens": 9}, EMBEDDINGS: {"input": "x"},
    RERANK: {"query": "x", "documents": ["y"]},
    TOKENS: {"token_ids": [1], "sampling_params": {}}, LABELS: {"query": "x", "items": ["y"], "label_token_ids": [1]},
    CLASSIFY: {"input": "x"}, POOLING: {"input": "x"}, COHERE: {},
    SCORE: PAIR, DECISIONS: {"state": "x", "questions": {"q": {"type": "bool"}}},
}  # fmt: skip
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    (CLASSIFY, "messages"): {}, (POOLING, "messages"): {}, (POOLING, "data"): {},
    (TEXT, "prompt_embeds"): {}, (EMBEDDINGS, "messages"): {}, (CHAT, "tool_choice"): {"messages": [NOTE], "tools": [
        {"type": "function", "function": {"name": LONG, "parameters": {}}}]},
    (RESPONSES, "tool_choice"): {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        "input": "x"},
    (SCORE, "queries"): {"documents": ["y"]}, (SCORE, "documents"): {"queries": "x"},
    (SCORE, "items"): {"queries": "x"},
    (SCORE, "data_1"): {"data_2": "y"}, (SCORE, "data_2"): {"data_1": "x"},
}  # fmt: skip
# Fields that carry nothing into the prompt: ec_transfer_params names no text, previous_response_id stands for what an
# engine has stored.
CARRIES_NONE_TEXT = """
    apply_softmax embedding_types input_type item_first label_token_ids output_dimension output_mode reasoning_ended
    reasoning_parser_kwargs sampling_params task token_offsets truncate
    add_generation_prompt add_special_tokens allowed_token_ids background bad_words best_of cache_salt
    continue_final_message dimensions early_stopping ec_transfer_params echo embed_dtype enable_response_messages
    encoding_format endianness frequency_penalty guided_decoding_backend ignore_eos include include_reasoning
    include_stop_str_in_output length_penalty logit_bias logprob_token_ids logprobs max_completion_tokens
    max_output_tokens max_tokens max_tokens_per_doc max_tokens_per_query max_tool_calls media_io_kwargs metadata min_p
    min_tokens mm_payload mm_processor_kwargs model n padding parallel_tool_calls presence_penalty
    previous_response_id priority prompt_cache_key prompt_logprobs reasoning reasoning_effort repetition_detection
    repetition_penalty request_id return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start seed service_tier session_id skip_special_tokens
    spaces_between_special_tokens stop stop_sequences stop_token_ids store stream stream_interval stream_options
    structured_outputs temperature thinking thinking_token_budget top_k top_logprobs top_n top_p
    truncate_prompt_tokens truncation truncation_side use_activation use_beam_search user vllm_xargs watermarking
"""
CARRIES_NONE = frozenset(CARRIES_NONE_TEXT.split())
WITH_EVERY_PROMPT = ("suffix", "instruction", "query", "text_1", "state", "instructions")
# The first is refused by vLLM, the others are no part of a prompt without messages.
CARRIES_NONE_ON = {(RESPONSES, "prompt"), (TEXT, "kv_transfer_params"), (TEXT, "response_format"),
    (TOKENS, "kv_transfer_params")}  # fmt: skip


def carried() -> list[dict[str, Any]]:
    """One case for each field that carries a prompt and each shape of its value."""
    return [
        {"route": route, "body": {**BESIDE.get((route, name), REST[route]), name: value}, "fields": [name]}
        for route, fields in CARRIES.items()
        for name, values in fields.items()
        for value in values
    ]


WORDS = ["", "a", "1,2", "[1]", " 7 ", "1_0", "+3", '"', "\\", "é", "7.0"]
KINDS: list[list[Any]] = [[7], [7.0], ["7"], ["text, [more]"], [True], [7, "7"]]


@dataclass
class Drawn:
    """Random prompts of every type that JSON has."""

    chance: random.Random

    def scalar(self) -> Any:
        number = self.chance.choice([0, 1, 7, 100, 100.0, 1e2, 0.5, -1, True, False, 2**40])
        odd = [None] if self.chance.random() < 0.1 else []
        return self.chance.choice([number, number, str(number), self.chance.choice(WORDS), *odd])

    def items(self, most: int, make: Callable[[], Any], least: int = 0) -> list[Any]:
        return [make() for _ in range(self.chance.randrange(least, most))]

    def alike(self) -> list[Any]:
        kind = self.chance.choice(KINDS)
        return self.items(4, lambda: self.chance.choice(kind))

    def value(self, depth: int = 0) -> Any:
        shape = self.chance.random()
        if depth > 2 or shape < 0.15:
            return self.scalar()
        if shape < 0.5:
            return self.alike()
        if shape < 0.7:
            return self.items(4, self.alike)
        return self.items(5, self.scalar) if shape < 0.8 else self.items(4, lambda: self.value(depth + 1))

    def messages(self) -> list[Any]:
        kinds = [NOTE, NOTE, message("user", [{"type": "text", "text": "x"}]), {}, "x"]
        return self.items(4, lambda: self.chance.choice(kinds), least=1)

    def conversations(self) -> list[Any]:
        return self.items(4, self.messages, least=1) if self.chance.random() < 0.5 else self.messages()

    def completion(self) -> dict[str, Any]:
        embeds = {"prompt_embeds": self.chance.choice(["QUJD", ["QUJD"] * self.chance.randrange(4), None])}
        return {"prompt": self.value()} | (embeds if self.chance.random() < 0.2 else {})


def drawn(seed: int) -> list[dict[str, Any]]:
    """Random bodies for the routes on which an engine may make several prompts of one body."""
    draw = Drawn(random.Random(seed))
    cases = [(TEXT, draw.completion()) for _ in range(1500)] + [
        (EMBEDDINGS, {"input": draw.value()}) for _ in range(1500)
    ]
    for _ in range(150):
        questions = {name: {"type": "bool"} for name in "abc"[: draw.chance.randrange(4)]}
        cases += [
            (EMBEDDINGS, {"input": draw.conversations()}),
            (EMBEDDINGS, {"messages": draw.conversations()}),
            (BATCH, {"messages": draw.conversations()}),
            (DECISIONS, {"state": "x", "questions": questions}),
            (RERANK, {"query": "x", "documents": draw.value()}),
            (SCORE, {"text_1": draw.chance.choice(["x", ["x", "y"]]), "text_2": draw.value()}),
        ]
    return [{"route": route, "body": body} for route, body in cases]


FUZZ = drawn(21)


@pytest.fixture(scope="module")
def vllm(part: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answer of vLLM's own code to all cases, from one run of the engine's Python."""
    folder = tmp_path_factory.mktemp("requests")
    return run_by_engine(part("engine").path, "engine_requests.py", carried() + FUZZ, folder)


def ours(case: dict[str, Any]) -> Any:
    return read(case["route"], json.dumps(case["body"], ensure_ascii=False).encode())


def test_every_field_of_the_engines_request_models_is_classified(vllm: Any):
    """A new vLLM with a new field fails here until somebody has said whether the field can carry a prompt."""
    assert set(ROUTES) == set(vllm["fields"])
    for route, names in vllm["fields"].items():
        unknown = {
            name
            for name in names
            if name not in CARRIES_NONE | CARRIES[route].keys() and (route, name) not in CARRIES_NONE_ON
        }
        assert not unknown, f"{route}: say whether {sorted(unknown)} can carry text or token ids into the prompt"


def test_salt_and_priority_stand_where_the_engine_takes_them(vllm: Any):
    """Salts are withheld where they mean nothing; a client of such a route is not isolated, which is documented."""
    forms = {route: form for route in ROUTES if (form := find(route).body) is not None}
    for field, added in (("cache_salt", "has_salt"), ("priority", "has_priority")):
        assert {route: field in vllm["fields"][route] for route in forms} == {
            route: getattr(form, added) for route, form in forms.items()
        }


def test_no_field_carries_more_prompt_than_estimated(vllm: Any):
    """Text counts for as many tokens as it has bytes, which no tokenizer exceeds."""
    estimator, seen = Estimator(), Counter[tuple[str, str]]()
    for case, theirs in zip(carried(), vllm["read"], strict=False):
        field, found = case["fields"][0], ours(case)
        if "refused" in theirs:
            continue
        seen[case["route"], field] += 1
        count = theirs["ids"] or theirs["text_bytes"] * (theirs["prompts"] if field in WITH_EVERY_PROMPT else 1)
        estimate = estimator.prompt(MODEL_NAME, found)
        assert estimate >= count / 8, (
            f"{case['route']} {field}: {estimate} tokens estimated of {count}: {str(case['body'])[:300]}"
        )
    unread = {(route, name) for route, names in CARRIES.items() for name, values in names.items() if values} - set(seen)
    assert not unread, "vLLM refused every value of these"


def test_prompts_are_as_many_as_the_engine_makes(vllm: Any):
    """Whatever JSON has for a prompt: what vLLM accepts counts as many prompts and token ids here as there."""
    compared = Counter[str]()
    for case, theirs in zip(carried() + FUZZ, vllm["read"], strict=True):
        if "refused" in theirs or case["route"] == RESPONSES:
            continue
        found = ours(case)
        compared[case["route"]] += 1
        assert max(1, theirs["prompts"]) == found.prompts, case["body"]
        if theirs["ids"] and "kv_transfer_params" not in case["body"]:
            assert theirs["ids"] <= found.prompt_ids <= theirs["ids"] + theirs["prompts"], case["body"]
    assert compared[TEXT] > 500
    assert compared[EMBEDDINGS] > 500
    assert min(compared[BATCH], compared[RERANK], compared[SCORE]) > 20

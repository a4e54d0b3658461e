"""Run by the engine's own Python: report how vLLM's request models and prompt parsing read a list of bodies on standard
input.

Prints one JSON object. fields: the fields of each route's request models. read: for each body either `refused`, or the
number of prompts, the token ids given in place of text, and the UTF-8 bytes of all strings in the fields that the case
names."""

import json
import os
import sys

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"


def models():
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest
    from vllm.entrypoints.generate.structured_decisions.protocol import StructuredDecisionRequest
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest
    from vllm.entrypoints.pooling.embed.protocol import CohereEmbedRequest, EmbeddingRequest
    from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest
    from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    return {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/chat/completions/batch": BatchChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": AnthropicMessagesRequest,
        "/v1/embeddings": EmbeddingRequest,
        "/v1/rerank": RerankRequest,
        "/v1/score": ScoreRequest,
        "/v1/systemone": StructuredDecisionRequest,
        "/inference/v1/generate": GenerateRequest,
        "/generative_scoring": GenerativeScoringRequest,
        "/classify": ClassificationRequest,
        "/pooling": PoolingRequest,
        "/v2/embed": CohereEmbedRequest,
    }


def fields(model):
    """Names of all fields of a model, or of every member of a union of models."""
    from typing import get_args

    if hasattr(model, "model_fields"):
        return set(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}
    return set().union(*(fields(part) for part in get_args(model) if isinstance(part, type) or get_args(part)))


def labelled(request):
    """The token ids of each prompt of a request for label scores."""
    query = request.query if isinstance(request.query, list) else []
    return [query + (item if isinstance(item, list) else []) for item in request.items]


AT_ROOT = {
    "/inference/v1/generate": lambda request: [request.token_ids],
    "/generative_scoring": labelled,
    "/v2/embed": lambda request: [None] * len(request.texts or request.images or request.inputs),
}


def prompts(route, request):
    """The prompts that an engine without media makes of a parsed request, each as its token ids or None."""
    from vllm.renderers.inputs.preprocess import parse_dec_only_prompt, prompt_to_seq

    def parsed(given):
        return [one if isinstance(one, bytes) else parse_dec_only_prompt(one) for one in prompt_to_seq(given)]

    if route == "/v1/completions":
        both = parsed(request.prompt_embeds) if request.prompt_embeds is not None else []
        both += parsed(request.prompt) if request.prompt is not None else []
        return [None if isinstance(one, bytes) else one.get("prompt_token_ids") for one in both]
    if route in AT_ROOT:
        return AT_ROOT[route](request)
    if route in ("/v1/embeddings", "/classify", "/pooling") and "IOProcessor" not in type(request).__name__:
        if "Batch" in type(request).__name__:
            return [None] * len(request.messages)
        return (
            [None]
            if "Chat" in type(request).__name__
            else [one.get("prompt_token_ids") for one in parsed(request.input)]
        )
    if route == "/v1/chat/completions/batch":
        return [None] * len(request.messages)
    if route in ("/v1/rerank", "/v1/score"):
        given = request.documents if route == "/v1/rerank" else request.data_2
        return [None] * (len(given) if isinstance(given, list) else 1)
    if route == "/v1/systemone":  # most models read each question with a prompt of its own
        return [None] * len(request.questions)
    return [None]


def text_bytes(value):
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(map(text_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(text_bytes, value))
    if hasattr(value, "model_dump"):
        return text_bytes(value.model_dump())
    if hasattr(value, "__iter__"):  # pydantic reads some lists lazily
        return sum(map(text_bytes, list(value)))
    return 0


def transferred(request):
    """Token ids that take the place of the messages."""
    from vllm.renderers import online_renderer

    class Renderer:
        def validate_token_ids(self, ids, parameter):
            pass

    return online_renderer._reused_prompt_token_ids(request, Renderer())


def read(case, known):
    from pydantic import TypeAdapter

    try:
        request = TypeAdapter(known[case["route"]]).validate_python(case["body"])
        ids = [len(one or ()) for one in prompts(case["route"], request)]
        forwarded = len(transferred(request) or ())
    except Exception as error:  # whatever it is, the server answers 400
        return {"refused": f"{type(error).__name__}: {error}"[:300]}
    held = sum(text_bytes(getattr(request, name, None)) for name in case.get("fields", ()))
    return {"prompts": len(ids), "ids": sum(ids) + forwarded, "text_bytes": held}


def main():
    known = models()
    json.dump(
        {
            "fields": {route: sorted(fields(model)) for route, model in known.items()},
            "read": [read(case, known) for case in json.load(sys.stdin)],
        },
        sys.stdout,
    )


main()

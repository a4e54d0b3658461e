"""Table of the engines' routes: which are served, how their requests and answers are read, what leaves a record.

A new route is one row. Invariant: what costs an engine tokens is recorded, and what changes an engine, or
shows one team the state of another, is refused; unknown paths are refused as well. Source: the routers of vLLM 0.32,
and of 0.33 for decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stack.gateway import answers, body_forms
from stack.gateway.answers import RouteAnswer
from stack.gateway.body_forms import BodyForm

Dialect = Literal["openai", "responses", "anthropic", "cohere"]

READS = frozenset(("GET", "HEAD", "OPTIONS"))
_POST = frozenset(("POST",))


@dataclass(frozen=True, slots=True)
class Route:
    """A route. body: how its requests are read; None where none leaves a record. answer: how its answers are read.
    dialect: the API whose clients read our errors. methods: those that are served. refused: why it is not served."""

    body: BodyForm | None = None
    answer: RouteAnswer = answers.OTHER_ANSWER
    dialect: Dialect = "openai"
    methods: frozenset[str] = _POST
    refused: str = ""


_COUNT = Route()
_ABORT, _CHANGE = "it ends requests of other teams", "it changes the engine for all teams"
# One row for all names of a route; {id} stands for that of a stored response.
_ROWS = {
    "/v1/chat/completions": Route(body_forms.CHAT_BODY, answers.CHAT_ANSWER),
    "/v1/chat/completions/batch": Route(body_forms.BATCH_BODY, answers.CHAT_ANSWER),
    "/v1/completions": Route(body_forms.COMPLETIONS_BODY, answers.CHAT_ANSWER),
    "/v1/responses": Route(body_forms.RESPONSES_BODY, answers.RESPONSES_ANSWER, "responses"),
    "/v1/messages": Route(body_forms.MESSAGES_BODY, answers.MESSAGES_ANSWER, "anthropic"),
    "/cohere/v2/chat": Route(body_forms.COHERE_CHAT_BODY, answers.COHERE_CHAT_ANSWER, "cohere"),
    "/inference/v1/generate": Route(body_forms.TOKENS_BODY, answers.CHAT_ANSWER),
    "/generative_scoring": Route(body_forms.LABELS_BODY, answers.SCORES_ANSWER),
    "/v1/systemone": Route(body_forms.QUESTIONS_BODY, answers.QUESTIONS_ANSWER),
    "/v1/decisions": Route(body_forms.DECISIONS_BODY),
    "/v1/embeddings": Route(body_forms.VECTORS_BODY, answers.VECTORS_ANSWER),
    "/v2/embed": Route(body_forms.COHERE_VECTORS_BODY, answers.COHERE_VECTORS_ANSWER),
    "/pooling": Route(body_forms.POOLING_BODY, answers.VECTORS_ANSWER),
    "/classify": Route(body_forms.VECTORS_BODY, answers.VECTORS_ANSWER),
    "/score /v1/score": Route(body_forms.SCORES_BODY, answers.SCORES_ANSWER),
    "/rerank /v1/rerank /v2/rerank": Route(body_forms.RERANK_BODY, answers.RERANK_ANSWER),
    "/v1/audio/transcriptions /v1/audio/translations": Route(body_forms.UPLOAD_BODY, answers.AUDIO_ANSWER),
    # these cost no tokens: prompts are rendered or counted, token ids decoded, a response cancelled
    "/tokenize /detokenize": _COUNT,
    "/v1/chat/completions/render /v1/completions/render /v1/responses/render /v1/messages/render": _COUNT,
    "/v1/chat/completions/derender /v1/completions/derender /v1/responses/{id}/cancel": _COUNT,
    "/v1/messages/count_tokens": Route(dialect="anthropic"),
    "/cohere/v2/chat/render": Route(dialect="cohere"),
    "/v1/models /v1/responses/{id} /tokenizer_info /version /load /ready /readyz": Route(methods=READS),
    "/openapi.json /docs /docs/oauth2-redirect /redoc": Route(methods=READS),
    "/ping": Route(methods=READS | _POST),
    "/v1/realtime": Route(methods=READS, refused="WebSocket connections are not served"),
    "/invocations": Route(refused="it names no API; send the request to the route of its API"),
    "/abort_requests /inference/v1/abort_requests": Route(refused=_ABORT),
    "/sleep /wake_up /release_kv_cache_memory /pause /resume /start_profile /stop_profile": Route(refused=_CHANGE),
    "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache /collective_rpc": Route(refused=_CHANGE),
    "/v1/load_lora_adapter /v1/unload_lora_adapter": Route(refused=_CHANGE),
    "/scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply /weight_checker": Route(refused=_CHANGE),
    "/init_weight_transfer_engine /shutdown_weight_transfer_engine /update_weight_version": Route(refused=_CHANGE),
    "/start_weight_update /start_draft_weight_update /update_weights /finish_weight_update": Route(refused=_CHANGE),
    "/server_info /is_sleeping /is_paused /weight_info /get_world_size /kv_event_sources /fault_tolerance/status"
    " /static": Route(methods=READS, refused="it shows the state of the engine to all teams"),
}
ROUTES = {path: route for paths, route in _ROWS.items() for path in paths.split()}
OTHER_ROUTE = Route()
RECORDED = frozenset(path for path, route in ROUTES.items() if route.body is not None)


def find(path: str) -> Route:
    """Return the row of a path; OTHER_ROUTE for one that has none."""
    if (route := ROUTES.get(path)) is not None:
        return route
    head, _, rest = path.removeprefix("/v1/responses/").partition("/")
    if not path.startswith("/v1/responses/") or not head:
        return OTHER_ROUTE
    return ROUTES.get("/v1/responses/{id}" + (f"/{rest}" if rest else ""), OTHER_ROUTE)


def plain(path: str) -> bool:
    """Return whether a decoded path can be read in one way only.

    An engine's router takes a path with a line break at its end for one without. A proxy before an engine may merge
    slashes, resolve dots, decode once more, or cut parameters off: then the request would get to a recorded route, on
    no record."""
    if not path.startswith("/") or not path.isprintable() or any(sign in path for sign in "\\;%"):
        return False
    return not {"", ".", ".."} & set(path.split("/")[1:])


def refusal(method: str, path: str, also: frozenset[str]) -> tuple[int, str] | None:
    """Return status and reason for which a request that leaves no record is not passed on; None for one that is. also:
    paths beside the known ones."""
    if path in also:
        return None
    route = find(path)
    if route.refused:
        return 404, f"{route.refused}; also_pass in gateway.yaml opens it to every team"
    if method in READS and (path.startswith("/v1/") or method in route.methods):
        return None
    if route is OTHER_ROUTE:
        return 404, "no route of a model; it would be on no record; also_pass in gateway.yaml opens it to every team"
    return None if method in route.methods else (405, f"it takes {', '.join(sorted(route.methods))}")

"""Body fields of each API route: prompts, output limit, media."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Routes that make or read tokens: each POST to them leaves one record. Everything else under /v1 (models, render,
# count_tokens, ...) is only passed on and leaves none. Source: the routers of vLLM 0.32, and of 0.33 for decisions.
RECORDED = frozenset(
    f"/v1/{name}"
    for name in (
        "chat/completions", "chat/completions/batch", "completions", "responses", "embeddings", "messages",
        "audio/transcriptions",
        "audio/translations", "rerank", "score", "systemone", "decisions",
    )
)  # fmt: skip
# Routes whose streams say that they are complete.
ENDING = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
# Routes whose streams tell their usage only when asked by stream_options.
USAGE_ON_REQUEST = frozenset(("/v1/chat/completions", "/v1/completions"))


@dataclass(frozen=True, slots=True)
class BodyForm:
    """Fields of a route.

    prompt: fields of text, parts, messages or token ids. each: those whose list items are prompts of their own;
    one_each: an engine reads only one of them. ids: those of them that take token ids. chats: those in which a list of
    objects is one conversation. named: objects each field of which is a prompt. against: fields that the engine reads
    once with every prompt of the others. whole: fields that go into the prompt as their JSON, with every prompt. maybe:
    those that may, as the chat template likes. media: fields of images, sounds or embeddings.
    quoting: media in messages of any role but user may become text. aside: all of whole and maybe.
    limit: fields that limit the output, the one that counts first; unsaid: the
    limit of a body without them, None for what the context has left. has_priority: whether the body may name the
    priority of its request; has_n: how many texts it wants.
    Source: the request models of vLLM 0.32 and 0.33 (entrypoints/**/protocol.py)."""

    prompt: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    one_each: bool = False
    ids: tuple[str, ...] = ()
    chats: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    maybe: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    quoting: bool = False
    aside: frozenset[str] = frozenset()
    limit: tuple[str, ...] = ()
    unsaid: int | None = None
    has_priority: bool = True
    has_n: bool = False


# Fields that limit the output on some route of some engine. Which of them it obeys has changed: 0.10 takes
# max_completion_tokens on any route, unless it is 0, later ones max_output_tokens as well. So every one is held to a
# team's limit on every route that makes
# text.
LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_CHAT_LIMIT = ("max_completion_tokens", "max_tokens")
_SCORED = ("documents", "items", "text_2", "data_2")
_TEMPLATE = ("chat_template", "chat_template_kwargs")
_SCORED_WITH = (*_TEMPLATE, "instruction")
_GIVEN, _ASIDE = ("tools", "functions", "documents"), ("response_format", "tool_choice", *_TEMPLATE)
BODY_ROUTES = {
    "/v1/chat/completions": BodyForm(("messages",), whole=_GIVEN, maybe=_ASIDE, limit=_CHAT_LIMIT, has_n=True),
    "/v1/chat/completions/batch": BodyForm(
        ("messages",), each=("messages",), whole=_GIVEN, maybe=_ASIDE, limit=_CHAT_LIMIT, has_n=True
    ),
    "/v1/completions": BodyForm(
        ("prompt",),
        each=("prompt", "prompt_embeds"),
        ids=("prompt",),
        against=("suffix",),
        media=("prompt_embeds",),
        limit=("max_tokens",),
        unsaid=16,
        has_n=True,
    ),
    "/v1/responses": BodyForm(
        ("instructions", "input"),
        whole=("tools",),
        maybe=("previous_input_messages", "tool_choice", "text", *_TEMPLATE),
        limit=("max_output_tokens",),
    ),
    "/v1/messages": BodyForm(
        ("system", "messages"),
        whole=("tools",),
        maybe=("tool_choice", "output_config", *_TEMPLATE),
        quoting=True,
        limit=("max_tokens",),
        has_priority=False,
    ),
    "/v1/embeddings": BodyForm(
        ("input", "messages"),
        each=("input", "messages"),
        one_each=True,
        ids=("input",),
        chats=("input", "messages"),
        maybe=_TEMPLATE,
        unsaid=0,
    ),
    "/v1/rerank": BodyForm(("documents",), each=("documents",), against=("query",), maybe=_SCORED_WITH, unsaid=0),
    "/v1/score": BodyForm(
        _SCORED, each=_SCORED, one_each=True, against=("queries", "text_1", "data_1"), maybe=_SCORED_WITH, unsaid=0
    ),
    "/v1/systemone": BodyForm(
        ("questions",),
        each=("questions",),
        named=("questions",),
        against=("instructions",),
        whole=("state",),
        maybe=("chat_template_kwargs",),
        media=("images", "audio", "videos"),
        unsaid=1,
    ),
    "/v1/decisions": BodyForm(
        ("questions",), each=("questions",), against=("input",), chats=("input",), unsaid=1, has_priority=False
    ),
}
BODY_ROUTES = {route: replace(how, aside=frozenset(how.whole + how.maybe)) for route, how in BODY_ROUTES.items()}
OTHER_ROUTE = BodyForm()
UPLOADS = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))  # forms with a file, no JSON

"""Forms of request bodies: prompts, output limit, media."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class BodyForm:
    """Fields of the bodies of a route.

    prompt: fields of text, parts, messages or token ids. each: those whose list items are prompts of their own;
    one_each: an engine reads only one of them. ids: those of them that take token ids; numbers: those of ids in which
    strings are token ids, too. chats: those in which a list of objects is one conversation. named: objects each field
    of which is a prompt. against: fields that the engine reads once with every prompt of the others. whole: fields that
    go into the prompt as their JSON, with every prompt. maybe: those that may, as the chat template likes. media:
    fields of images, sounds or embeddings. quoting: media in messages of any role but user may become text. aside: all
    of whole and maybe. limit: fields that limit the output, the one that counts first; limit_required: whether an
    engine refuses a body without; unsaid: the limit of a body without them, None for what the context has left. within:
    the field that holds the limit and n. cuts: whether the engine cuts a prompt that is too long, unless the field
    truncate says NONE. has_priority: whether the body may name the priority of its request; has_n: how many texts it
    wants; has_salt: the salt of the prefix cache. usage_option: whether streams report usage only when stream_options
    asks for it. logprobs: fields that ask for log-probabilities; top_logprobs: the one that says how many of each token
    of output. form: whether it is a form with a file, of which the model alone is read.
    Source: the request models of vLLM 0.32 and 0.33 (entrypoints/**/protocol.py)."""

    prompt: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    one_each: bool = False
    ids: tuple[str, ...] = ()
    chats: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    maybe: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    quoting: bool = False
    aside: frozenset[str] = field(init=False, default=frozenset())
    limit: tuple[str, ...] = ()
    limit_required: bool = False
    unsaid: int | None = None
    within: str = ""
    cuts: bool = False
    has_priority: bool = True
    has_n: bool = False
    has_salt: bool = True
    usage_option: bool = False
    logprobs: frozenset[str] = frozenset()
    top_logprobs: str = ""
    form: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "aside", frozenset(self.whole + self.maybe))


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
_LOGPROBS = frozenset(("logprobs", "logprob_token_ids", "prompt_logprobs", "echo", "use_beam_search"))
CHAT_BODY = BodyForm(
    ("messages",),
    whole=_GIVEN,
    maybe=_ASIDE,
    limit=_CHAT_LIMIT,
    has_n=True,
    usage_option=True,
    logprobs=_LOGPROBS | {"top_logprobs"},
    top_logprobs="top_logprobs",
)
BATCH_BODY = replace(CHAT_BODY, each=("messages",), usage_option=False)
COMPLETIONS_BODY = BodyForm(
    ("prompt",),
    each=("prompt", "prompt_embeds"),
    ids=("prompt",),
    against=("suffix",),
    media=("prompt_embeds",),
    limit=("max_tokens",),
    unsaid=16,
    has_n=True,
    usage_option=True,
    logprobs=_LOGPROBS,
    top_logprobs="logprobs",
)
RESPONSES_BODY = BodyForm(
    ("instructions", "input"),
    whole=("tools",),
    maybe=("previous_input_messages", "tool_choice", "text", *_TEMPLATE),
    limit=("max_output_tokens",),
    logprobs=frozenset(("include", "top_logprobs")),
    top_logprobs="top_logprobs",
)
MESSAGES_BODY = BodyForm(
    ("system", "messages"),
    whole=("tools",),
    maybe=("tool_choice", "output_config", *_TEMPLATE),
    quoting=True,
    limit=("max_tokens",),
    limit_required=True,
    has_priority=False,
)
COHERE_CHAT_BODY = BodyForm(
    ("messages",), whole=_GIVEN, maybe=_ASIDE, limit=("max_tokens",), has_salt=False, logprobs=frozenset(("logprobs",))
)
TOKENS_BODY = BodyForm(
    ("token_ids",),
    ids=("token_ids",),
    numbers=("token_ids",),
    media=("features", "content_parts"),
    limit=("max_tokens",),
    within="sampling_params",
    has_n=True,
    usage_option=True,
    logprobs=frozenset(("logprobs", "logprob_token_ids", "prompt_logprobs", "prompt_logprob_token_ids")),
    top_logprobs="logprobs",
)
VECTORS_BODY = BodyForm(
    ("input", "messages"),
    each=("input", "messages"),
    one_each=True,
    ids=("input",),
    chats=("input", "messages"),
    maybe=_TEMPLATE,
    unsaid=0,
)
POOLING_BODY = replace(VECTORS_BODY, prompt=("input", "messages", "data"))
COHERE_VECTORS_BODY = BodyForm(
    ("texts", "inputs"),
    each=("texts", "inputs", "images"),
    one_each=True,
    media=("images",),
    unsaid=0,
    cuts=True,
    has_salt=False,
)
RERANK_BODY = BodyForm(("documents",), each=("documents",), against=("query",), maybe=_SCORED_WITH, unsaid=0)
SCORES_BODY = BodyForm(
    _SCORED, each=_SCORED, one_each=True, against=("queries", "text_1", "data_1"), maybe=_SCORED_WITH, unsaid=0
)
LABELS_BODY = BodyForm(
    ("items",), each=("items",), ids=("items", "query"), numbers=("query",), against=("query",), unsaid=1
)
QUESTIONS_BODY = BodyForm(
    ("questions",),
    each=("questions",),
    named=("questions",),
    against=("instructions",),
    whole=("state",),
    maybe=("chat_template_kwargs",),
    media=("images", "audio", "videos"),
    unsaid=1,
)
DECISIONS_BODY = BodyForm(
    ("questions",), each=("questions",), against=("input",), chats=("input",), unsaid=1, has_priority=False
)
UPLOAD_BODY = BodyForm(form=True, has_salt=False)
OTHER_BODY = BodyForm()

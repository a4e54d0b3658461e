"""docs/reference/routes.md: every route of the engines, whether the gateway serves it, and how it reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from stack.gateway.answers import EVENTS, JSON
from stack.gateway.routes import ROUTES, Route
from stack.reference.markdown import PRINTED, listed, table

_DIALECTS = {"openai": "OpenAI", "responses": "OpenAI", "anthropic": "Anthropic", "cohere": "Cohere"}
_HEAD = """
The routes of vLLM 0.32 and what the [gateway](../guides/gateway.md) does with each.

## Recorded

Each POST passes admission and leaves one record. The model is the field `model`, of a form its part `model`. Errors
have the form of the API, so that its official client raises them.
"""
_REQUESTS = """
An empty limit: the engine makes no text. A number: it makes so many tokens. Limits in a form are not read: the
audio model decides on the length of its text. No cache salt: the engine takes none, so teams share its prefix cache.
"""
_ANSWERS = """
An answer without these forms is [unreadable](../guides/gateway.md#answers-of-engines). Of several names the first that
is present counts. Cached tokens (`cached_tokens`, `cache_read_input_tokens`) are part of the prompt: to an
`input_tokens` beside `cache_read_input_tokens` and `cache_creation_input_tokens` these are added.

## Passed without a record

They cost an engine no tokens. Every other GET below /v1 is passed as well. GET includes HEAD and OPTIONS.
"""
_REFUSED = """
## Refused

404, unless `also_pass` in gateway.yaml names the route. So is every path that stands nowhere above and is no GET below
/v1. Another method of a served route is 405.
"""


def page() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from ("# Routes", "", PRINTED.format(source="`stack/gateway/routes.py`"), *_HEAD.splitlines(), "")
    recorded = {path: route for path, route in ROUTES.items() if route.body is not None}
    yield from table(("route", "prompt", "limit of the output", "cache salt", "errors"), _rows(recorded, _request))
    yield from (*_REQUESTS.strip().splitlines(), "")
    yield from table(
        ("route", "media types", "complete with", "prompt tokens", "output tokens", "where"), _rows(recorded, _answer)
    )
    yield from (*_ANSWERS.strip().splitlines(), "")
    passed = {path: route for path, route in ROUTES.items() if route.body is None and not route.refused}
    yield from table(("route", "methods", "errors"), _rows(passed, _methods))
    yield from (*_REFUSED.strip().splitlines(), "")
    refused = _rows({path: route for path, route in ROUTES.items() if route.refused}, lambda route: (route.refused,))
    yield from listed(f"{reason}: {paths}" for paths, reason in refused)
    yield from ("Test status: [routes (reference)](../internals/test-status.md#routes-reference).", "")


def _rows(routes: dict[str, Route], cells: Callable[[Route], tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield one row for all routes that have the same cells."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for path, route in routes.items():
        rows.setdefault(cells(route), []).append(path)
    for row, paths in rows.items():
        yield _names(paths), *row


def _names(names: Iterable[str], between: str = ", ") -> str:
    return between.join(f"`{name}`" for name in names)


def _request(route: Route) -> tuple[str, ...]:
    if (how := route.body) is None or how.form:
        return "the file", "of the model", "no", _DIALECTS[route.dialect]
    prompt = _names(dict.fromkeys(how.prompt + how.against + how.whole + how.media))
    limit = _names(f"{how.within}.{name}" if how.within else name for name in how.limit)
    salt = "yes" if how.has_salt else "no"
    return prompt, limit or str(how.unsaid or ""), salt, _DIALECTS[route.dialect]


def _answer(route: Route) -> tuple[str, ...]:
    answer, usage = route.answer, route.answer.usage
    generates = route.body is None or route.body.unsaid != 0
    where = ["usage", *(f"usage.{name}" for name in usage.inner if answer.streams)]
    where += [f"meta.{name}" for name in usage.inner if not answer.streams]
    return (
        ", ".join((JSON, *((EVENTS,) if answer.streams else ()), *sorted(answer.media))),
        _names(answer.keys) + (", or a list" if answer.lists else ""),
        _names(usage.prompt + (("total_tokens",) if usage.total else ())),
        _names(usage.output) if generates else "",
        _names(where) + (f", of bytes the header `{usage.header}`" if usage.header else ""),
    )


def _methods(route: Route) -> tuple[str, ...]:
    return ", ".join(sorted(route.methods - {"HEAD", "OPTIONS"})), _DIALECTS[route.dialect]

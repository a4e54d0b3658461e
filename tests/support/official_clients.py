"""Official clients of OpenAI, Anthropic and LiteLLM at one address, which send each request once.

A library is imported at its first call: together they take 4 s."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import downloads prices


@dataclass(frozen=True, slots=True)
class Api:
    """A method of a client. prompt, limit: its fields for the input and for the most tokens of output. vendor: prefix
    of models that tells LiteLLM which API to speak."""

    library: str
    method: str
    prompt: str = "messages"
    limit: str = "max_tokens"
    vendor: str = ""

    def filled(self, text: str) -> dict[str, Any]:
        """Return the field for the input with this text."""
        return {self.prompt: [{"role": "user", "content": text}] if self.prompt == "messages" else text}


APIS = {
    "chat": Api("openai", "chat.completions.create"),
    "completions": Api("openai", "completions.create", "prompt"),
    "responses": Api("openai", "responses.create", "input", "max_output_tokens"),
    "messages": Api("anthropic", "messages.create"),
    "count": Api("anthropic", "messages.count_tokens", limit=""),
    "litellm-openai": Api("litellm", "__call__", vendor="openai/"),
    "litellm-anthropic": Api("litellm", "__call__", vendor="anthropic/"),
}


@dataclass(frozen=True, slots=True)
class Clients:
    """Clients of the server at this URL. key: their API key; model: of their requests."""

    url: str
    key: str
    model: str

    def call(self, name: str, **change: Any) -> Any:
        """Return what a method returns for a small request, changed."""
        api = APIS[name]
        body = {"model": self.model} | api.filled("the cache") | ({api.limit: 12} if api.limit else {}) | change
        body["model"] = api.vendor + body["model"]
        if api.library == "anthropic" and "temperature" in body:  # which its methods do not take
            body["extra_body"] = {"temperature": body.pop("temperature")}
        return attrgetter(api.method)(self.client(api.library, api.vendor))(**body)

    def client(self, library: str, vendor: str = "") -> Any:
        """Return a client; of LiteLLM its one function."""
        module: Any = importlib.import_module(library)
        url = f"{self.url}/v1"
        if library == "openai":
            return module.OpenAI(base_url=url, api_key=self.key, max_retries=0)
        if library == "anthropic":  # with the default time limit it refuses to wait for a long reply
            return module.Anthropic(base_url=self.url, api_key=self.key, max_retries=0, timeout=60)
        module.suppress_debug_info = True
        base = url if vendor == "openai/" else self.url
        return partial(module.completion, api_base=base, api_key=self.key, num_retries=0, max_retries=0)


def outcome(call: Callable[[], Any]) -> tuple[type[Exception] | None, Any]:
    """Return the class and the status of what a call raises, or None and the text that it returns."""
    try:
        got = call()
        return None, "".join(_text(part.model_dump()) for part in ([got] if hasattr(got, "model_dump") else got))
    except Exception as error:
        return type(error), getattr(error, "status_code", None)


def _text(part: dict[str, Any]) -> str:
    """Return the text of a reply or of an event."""
    match part:
        case (
            {"choices": [{"message": {"content": str(text)}}]}
            | {"choices": [{"delta": {"content": str(text)}}]}
            | {"choices": [{"text": str(text)}]}
            | {"content": [{"text": str(text)}]}
            | {"delta": {"text": str(text)}}
            | {"output": [{"content": [{"text": str(text)}]}]}
            | {"type": "response.output_text.delta", "delta": str(text)}
            | {"input_tokens": text}
        ):
            return str(text)
    return ""

"""Requests of golden checks: tokens of a text, log-probabilities of a prompt, greedy completions, rendered chats.

Invariants: one request with log-probabilities at a time and of at most LONGEST_TOKENS; every request that an engine
works on is counted, and recorded as a probe where a log is given. What an engine offers is seen from its answers."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec

from exporters.catalogue.exposition_parser import BadExposition
from exporters.engine.client import EngineClient, ModelCard
from exporters.net.http_client import describe_error
from exporters.requests.record import Outcome, fitting_line
from stack.gateway.probe import probe_record
from stack.gateway.reply import Reply
from stack.golden.baseline import EngineIdentity, GoldenError
from stack.golden.comparison import NEAR
from stack.golden.prompts import LONGEST_TOKENS

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
ANSWER_S = 120.0  # a check may wait behind other requests
ANSWER_BYTES = 4 << 20  # 128 tokens have 20 kB
GREEDY_TOKENS = 16
_MISSING = (404, 405, 501)
_NAN = b"JSON compliant"  # vLLM's encoder refuses NaN with this sentence (0.32); infinity comes as -9999
_MINUS_INFINITY = -9999.0
_MESSAGE_CHARS = 200


class NotFinite(Exception):
    """Log-probabilities that are NaN or infinite; the message is the evidence."""


class _TokenScore(msgspec.Struct):
    logprob: float | None = None
    rank: int | None = None


class _Greedy(msgspec.Struct):
    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _GoldenChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenScore] | None] | None = None
    logprobs: Any = None


class _GoldenAnswer(msgspec.Struct):
    """Fields of completions and of chats; token ids and log-probabilities of a prompt are at the top for chats."""

    choices: list[_GoldenChoice] = []
    prompt_logprobs: list[dict[str, _TokenScore] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _ChoiceIds(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _AnswerIds(msgspec.Struct):
    choices: list[_ChoiceIds] = []
    prompt_token_ids: list[int] | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class PromptScore(NamedTuple):
    """Log-probabilities of a prompt's tokens from the second on. best: most likely token at each place; gaps: by how
    much it was more likely, where it was another one and the prompt's own not too unlikely for comparison.logit_bits.
    Both are empty where only the prompt's own are reported."""

    own: tuple[float, ...]
    best: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


class GreedyTokens(NamedTuple):
    tokens: tuple[str, ...]
    gaps: tuple[float, ...]


class ScoredPrompt(Protocol):
    """Prompt as far as its log-probabilities are requested."""

    @property
    def text(self) -> str: ...
    @property
    def ids(self) -> tuple[int, ...]: ...


@dataclass(slots=True)
class GoldenClient:
    """Client of one engine and model. top_logprobs: k of prompt_logprobs. probe_log: file that gets a record for each
    request. tokens, requests: what the engine has worked on so far."""

    engine: EngineClient
    model: str
    top_logprobs: int = 1
    probe_log: Path | None = None
    tokens: int = 0
    requests: int = 0
    _recorded: int = field(default=0, init=False)

    @property
    def address(self) -> str:
        """host:port, like Prometheus' label instance."""
        return self.engine.url.partition("://")[2].rpartition("@")[2].partition("/")[0]

    # ---- what the engine is

    async def identity(self) -> EngineIdentity:
        """Return what the engine says of itself. Raises GoldenError if it does not serve the model."""
        served = next((each for each in await served_models(self.engine) if each.id == self.model), None)
        if served is None:
            raise GoldenError(f"{self.engine.url} does not serve {self.model}")
        options = _model_config(await self.engine.server_info())
        return EngineIdentity(
            model=served.id,
            root=served.root,
            max_model_len=served.max_model_len,
            version=await self.engine.version(),
            dtype=_word(options.get("dtype")),
            quantization=_word(options.get("quantization")),
        )

    # ---- tokens

    async def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, by /tokenize, else by a completion of one token; none where neither reports
        them."""
        ids = await self._tokenize({"model": self.model, "prompt": text})
        return ids or await self._rendered(COMPLETIONS, {"prompt": text}) or ()

    async def chat_ids(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        """Return the tokens that the chat route makes of messages; by /tokenize where it does not report them, and None
        where the model has no chat."""
        body: dict[str, Any] = {"messages": list(messages)} | ({"chat_template_kwargs": options} if options else {})
        return await self._rendered(CHAT, body) or await self._tokenize({"model": self.model, **body})

    async def _rendered(self, route: str, body: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the prompt's tokens as a route reports them; None where it does not, or is not there."""
        status, answer = await self._generate(route, {**body, "max_tokens": 1, "return_token_ids": True})
        if status in _MISSING or (status == 400 and route == CHAT):  # a model without a chat template
            return None
        self._require_ok(route, status, answer)
        found = self._decoded(route, answer, _AnswerIds)
        ids = found.prompt_token_ids or next((one.prompt_token_ids for one in found.choices), None)
        return tuple(ids) if ids else None

    async def _tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...] | None:
        status, answer = await self._post(TOKENIZE, body)
        if status in _MISSING or (status == 400 and "messages" in body):
            return None
        self._require_ok(TOKENIZE, status, answer)
        return tuple(self._decoded(TOKENIZE, answer, _Tokens).tokens)

    async def offers_completions(self) -> bool:
        """Return whether the engine has the route of completions."""
        status, _ = await self._generate(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        return status not in _MISSING

    # ---- numbers

    async def score(self, ids: Sequence[int]) -> PromptScore:
        """Return the log-probabilities of token ids. Raises NotFinite, and GoldenError where the engine has none."""
        return await self._score(COMPLETIONS, {"prompt": list(ids)}, ids)

    async def score_message(self, text: str, options: Mapping[str, Any], ids: Sequence[int]) -> PromptScore:
        """Return the same by the chat route, for a message that is rendered as these ids."""
        body = {"messages": [{"role": "user", "content": text}]}
        return await self._score(CHAT, body | ({"chat_template_kwargs": options} if options else {}), ids)

    async def _score(self, route: str, body: Mapping[str, Any], ids: Sequence[int]) -> PromptScore:
        if len(ids) > LONGEST_TOKENS:
            raise GoldenError(f"a prompt has {len(ids)} tokens; at most {LONGEST_TOKENS} can be compared")
        asked = {**body, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self.top_logprobs}
        status, answer = await self._generate(route, asked, len(ids))
        if status == 400 and self.top_logprobs and b"max allowed" in answer:  # --max-logprobs 0
            self.top_logprobs = 0
            return await self._score(route, body, ids)
        if status == 500:
            plain = {name: value for name, value in asked.items() if name != "prompt_logprobs"}
            if (await self._generate(route, plain))[0] == 200:
                raise NotFinite("requests with log-probabilities fail with 500, the same ones without are answered")
        self._require_ok(route, status, answer)
        found = self._decoded(route, answer, _GoldenAnswer)
        entries = found.prompt_logprobs or next((choice.prompt_logprobs for choice in found.choices), None)
        if not entries:
            raise GoldenError(
                f"{self.engine.url} does not answer prompt_logprobs, which golden checks need; check vLLM itself, not"
                " another server"
            )
        return read_scores(entries, ids)

    async def score_all(
        self, route: str, prompts: Sequence[ScoredPrompt], options: Mapping[str, Any]
    ) -> list[PromptScore]:
        """Return the scores of prompts by a route, one request after the other. options: chat_template_kwargs."""
        if route == CHAT:
            return [await self.score_message(prompt.text, options, prompt.ids) for prompt in prompts]
        return [await self.score(prompt.ids) for prompt in prompts]

    async def keep_busy(self, route: str, ids: Sequence[int], text: str, tokens: int) -> None:
        """Request plain text, which only loads the engine."""
        prompt = {"messages": [{"role": "user", "content": text}]} if route == CHAT else {"prompt": list(ids)}
        status, answer = await self._generate(route, {**prompt, "max_tokens": tokens, "ignore_eos": True})
        self._require_ok(route, status, answer)

    async def greedy(self, ids: Sequence[int]) -> GreedyTokens | None:
        """Return the greedy completion of token ids; None where the engine reports no tokens. Raises NotFinite."""
        # logprobs: 2 shows by how much a token was chosen
        body = {"prompt": list(ids), "max_tokens": GREEDY_TOKENS, "temperature": 0, "logprobs": 2 * self.top_logprobs,
                "return_tokens_as_token_ids": True, "ignore_eos": True}  # fmt: skip
        status, answer = await self._generate(COMPLETIONS, body, len(ids))
        if status in _MISSING:
            return None
        self._require_ok(COMPLETIONS, status, answer)
        choices = self._decoded(COMPLETIONS, answer, _GoldenAnswer).choices
        try:
            found = msgspec.convert(choices[0].logprobs if choices else None, _Greedy | None)
        except msgspec.ValidationError:
            found = None
        if found is None or not found.tokens:
            return None
        tops = found.top_logprobs or [None] * len(found.tokens)
        return GreedyTokens(tuple(found.tokens), tuple(_gap(top) for top in tops))

    # ---- transport

    async def _generate(
        self, route: str, body: Mapping[str, Any], prompt_tokens: int | None = None
    ) -> tuple[int, bytes]:
        """Send a request that the engine works on, count and record it. Raises NotFinite, GoldenError.

        prompt_tokens: for the record of a request that the engine finished and could not answer."""
        began, reply, request_id = time.monotonic(), Reply(route), f"probe-{secrets.token_hex(8)}"
        status: int | None = None
        outcome: Outcome = "client_abort"
        try:
            status, answer = await self._post(route, {"model": self.model, **body}, request_id)
            reply.read(status, "", answer, len(answer))
            outcome = "ok" if status == 200 else "rejected" if status < 500 else "upstream_error"
            if status == 400 and _NAN in answer:
                # The engine has finished and counted it; only its answer could not be written.
                reply.prompt_tokens, reply.completion_tokens = prompt_tokens, 1
                reply.finish_reasons, outcome = {"length"}, "client_abort"
                raise NotFinite("the engine answers 400: log-probabilities are NaN or infinite")
            return status, answer
        finally:
            self.requests += 1
            self.tokens += (reply.prompt_tokens or 0) + (reply.completion_tokens or 0)
            if self.probe_log is not None:
                elapsed_s = time.monotonic() - began
                _append(
                    self.probe_log,
                    fitting_line(
                        probe_record(self.address, self.model, route, request_id, reply, status, outcome, elapsed_s)
                    ),
                )

    async def _post(self, route: str, body: object, request_id: str | None = None) -> tuple[int, bytes]:
        try:
            return await self.engine.post(route, body, request_id, ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GoldenError(_silent(self.engine.url + route, error)) from None

    def _require_ok(self, route: str, status: int, answer: bytes) -> None:
        """Raise GoldenError with the engine's words for any status but 200."""
        if status == 200:
            return
        place = f"{self.engine.url}{route} answers {status}"
        if status in (401, 403):
            raise GoldenError(f"{place}; give the key with --api-key-file")
        said = _message(answer)
        raise GoldenError(f"{place}{f': {said}' if said else ''}")

    def _decoded(self, route: str, answer: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise GoldenError(
                f"{self.engine.url}{route} answers something else than vLLM's JSON; is it vLLM?"
            ) from None


async def served_models(engine: EngineClient) -> list[ModelCard]:
    """Return the served models, adapters left out. Raises GoldenError."""
    place = f"{engine.url}/v1/models"
    try:
        models = [each for each in await engine.models() if each.parent is None]
    except aiohttp.ClientResponseError as error:
        hint = "; give the key with --api-key-file" if error.status in (401, 403) else "; is this the URL of vLLM?"
        raise GoldenError(f"{place} answers {error.status}{hint}") from None
    except BadExposition:
        raise GoldenError(f"{place} answers no list of models; is this the URL of vLLM?") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise GoldenError(_silent(place, error)) from None
    if not models:
        raise GoldenError(f"{place} lists no model")
    return models


def read_scores(entries: Sequence[Mapping[str, _TokenScore] | None], ids: Sequence[int]) -> PromptScore:
    """Return the scores of a prompt from the engine's entries. Raises NotFinite, and GoldenError for entries of other
    tokens or of logits."""
    if len(entries) != len(ids):
        raise GoldenError(f"the engine answers with {len(entries)} log-probabilities for {len(ids)} tokens")
    own, best, gaps = list[float](), list[int](), list[float]()
    for place, (entry, token) in enumerate(zip(entries[1:], ids[1:], strict=True), 1):
        score = (entry or {}).get(str(token))
        if score is None:
            raise GoldenError(f"the engine answers with another token than it was sent at position {place}")
        if score.logprob is None or not math.isfinite(score.logprob) or score.logprob <= _MINUS_INFINITY:
            raise NotFinite(f"the log-probability at position {place} is not finite")
        known = {name: each.logprob for name, each in (entry or {}).items() if each.logprob is not None}
        if sum(math.exp(min(value, 1.0)) for value in known.values()) > 1.001:
            raise GoldenError(
                "the engine reports values that are no log-probabilities; start it without --logprobs-mode, or with"
                " raw_logprobs"
            )
        own.append(score.logprob)
        if len(known) > 1 or score.rank == 1:
            top = max(known, key=known.__getitem__)
            best.append(int(top))
            if top != str(token) and score.logprob > -NEAR:
                gaps.append(known[top] - score.logprob)
    return PromptScore(tuple(own), tuple(best) if len(best) == len(own) else (), tuple(gaps))


def _gap(top: Mapping[str, float] | None) -> float:
    """Return by how much the most likely token was more likely than the next; 0 if only one is known."""
    if not top:
        return 0.0
    first, *others = sorted(top.values(), reverse=True)
    return first - others[0] if others else 0.0


def _model_config(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model's options in the response of /server_info; empty where it has none."""
    config = info.get("vllm_config")
    model = config.get("model_config") if isinstance(config, dict) else None
    return model if isinstance(model, dict) else {}


def _word(value: object) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, str) else None


def _silent(place: str, error: Exception) -> str:
    cause = describe_error(error) or str(error) or "no answer in time"
    return f"{place} does not answer ({cause}); is vLLM up, and is that its address?"


def _message(answer: bytes) -> str:
    """Return the message of an error response, in one line."""
    try:
        body = json.loads(answer)
    except ValueError:
        return ""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(message.split())[:_MESSAGE_CHARS] if isinstance(message, str) else ""


def _append(path: Path, line: bytes) -> None:
    """Append one line. Raises GoldenError: checks without a record would look like lost requests."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError as error:
        raise GoldenError(f"{path} cannot be written: {error.strerror}") from None

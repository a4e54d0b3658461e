"""Prompts of an exact number of tokens, by the engine's own tokenizer.

Words are drawn at random from those of one text, as token ids, so that a prompt has the requested length and differs
from all others with another key. For chat, the text is measured with the chat template and fixed until the engine
counts the same. The tokens of a segment follow from its key and the bench's seed alone; the keys of a plan say what two
runs share (workload.py)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import aiohttp
import msgspec

from exporters.net.bounded_read import read_bounded
from exporters.net.http_client import describe_error
from stack.bench.load import Prepared
from stack.bench.result import request_id
from stack.bench.workload_plan import PlannedRequest

Route = Literal["completions", "chat"]
ROUTES: Mapping[Route, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MOST_FIXES = 12
OTHER_WORDS = 4, 8  # after 4 fixes, draw the last 8 words anew: some texts have no end with this number of tokens
COUNTED_AT_ONCE = 8
TEXT = (
    "Before the first lamp was lit the keeper wrote down the wind, the height of the tide and the names of the ships"
    " that had passed. Nobody had asked for such a list; yet when the harbour was to be rebuilt, forty years of small"
    " figures told the engineers where the water ran deep, which months were quiet, and how often a pilot had been"
    " called out in vain. A measure that is taken every day costs little, and its worth is seen late. Numbers 0 1 2 3 4"
    " 5 6 7 8 9, brackets ( ) [ ] { }, and def return import class for in if else."
)

_encode = msgspec.json.Encoder().encode


class NoTokenizer(ValueError):
    """Server without a usable tokenizer; the message has its answer."""


class Tokenizer(Protocol):
    """Tokenizer of an engine."""

    async def ids(self, text: str) -> list[int]: ...

    async def text(self, ids: Sequence[int]) -> str: ...

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> int:
        """Count the tokens of a chat with its template, up to the start of the answer."""
        ...


class Remote:
    """Client of a server's /tokenize and /detokenize. Raises NoTokenizer."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, key: str | None = None) -> None:
        self._session, self._url, self._model = session, url, model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def ids(self, text: str) -> list[int]:
        return list(await self._ask("/tokenize", {"prompt": text, "add_special_tokens": False}, "tokens", list))

    async def text(self, ids: Sequence[int]) -> str:
        return str(await self._ask("/detokenize", {"tokens": list(ids)}, "prompt", str))

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> int:
        return int(
            await self._ask("/tokenize", {"messages": list(messages), "add_generation_prompt": True}, "count", int)
        )

    async def _ask(self, route: str, body: Mapping[str, Any], field: str, kind: type) -> Any:
        why = ""
        try:
            async with self._session.post(
                f"{self._url}{route}", json={"model": self._model, **body}, headers=self._headers
            ) as response:
                status, answer = response.status, json.loads(await read_bounded(response))
            if status == 200 and isinstance(answer, dict) and isinstance(answer.get(field), kind):
                return answer[field]
            why = f"answers {status}"
        except ValueError:  # no JSON
            why = "answers something that is no JSON"
        except (aiohttp.ClientError, TimeoutError) as error:
            why = f"does not answer ({describe_error(error) or error or type(error).__name__})"
        raise NoTokenizer(
            f"{self._url}{route} {why}; lengths in tokens need the engine's own tokenizer, so give the address of vLLM"
            " itself"
        )


class Writer:
    """Builder of the requests of one bench. vocabulary: token ids of prompts."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Sequence[int], model: str, bench: str, seed: int) -> None:
        self._tokenizer, self._vocabulary, self._model, self._bench, self._seed = (
            tokenizer,
            vocabulary,
            model,
            bench,
            seed,
        )

    @classmethod
    async def of(cls, tokenizer: Tokenizer, model: str, bench: str, seed: int) -> Writer:
        """Create a writer for a model. Raises NoTokenizer."""
        vocabulary = sorted(set(await tokenizer.ids(TEXT)))
        if len(vocabulary) < 2:
            raise NoTokenizer(
                f"the engine's tokenizer makes {len(vocabulary)} tokens of {len(TEXT)} letters; prompts cannot differ"
            )
        return cls(tokenizer, vocabulary, model, bench, seed)

    def through(self, tokenizer: Tokenizer) -> Writer:
        """Return a copy that uses another tokenizer for the same model."""
        return Writer(tokenizer, self._vocabulary, self._model, self._bench, self._seed)

    async def prepare(
        self, asks: Sequence[PlannedRequest], run: int, route: Route, options: Mapping[str, Any], instruction: str = ""
    ) -> list[Prepared]:
        """Build the requests of a run. options: part of every body, such as ignore_eos. instruction: before the last
        words of each chat."""
        if route == "completions":
            return [self._completion(ask, run, options) for ask in asks]
        places = asyncio.Semaphore(COUNTED_AT_ONCE)

        async def chat(ask: PlannedRequest) -> Prepared:
            async with places:
                return await self._chat(ask, run, options, instruction)

        return list(await asyncio.gather(*map(chat, asks)))

    def ids(self, key: str, tokens: int) -> list[int]:
        """Return the token ids of a segment."""
        return random.Random(f"{self._seed}/{key}").choices(self._vocabulary, k=tokens)  # noqa: S311 (nothing secret)

    def _completion(self, ask: PlannedRequest, run: int, options: Mapping[str, Any]) -> Prepared:
        prompt = [token for segment in ask.segments for token in self.ids(segment.key, segment.tokens)]
        return self._prepared(ask, run, "completions", {"prompt": prompt}, options, len(prompt))

    async def _chat(self, ask: PlannedRequest, run: int, options: Mapping[str, Any], instruction: str) -> Prepared:
        """Build a chat with a message for each segment. The last one is made longer or shorter until the chat has its
        number of tokens, template and instruction included."""
        *before, last = ask.segments
        messages = [
            {"role": _role(segment.key), "content": await self._tokenizer.text(self.ids(segment.key, segment.tokens))}
            for segment in before
        ]
        wanted, size, count = ask.prompt_tokens, last.tokens, 0
        whole: list[dict[str, str]] = []
        for fix in range(MOST_FIXES):
            kept = size if fix < OTHER_WORDS[0] else max(0, size - OTHER_WORDS[1])
            words = await self._tokenizer.text([*self.ids(last.key, kept), *self.ids(f"{last.key}/{fix}", size - kept)])
            whole = [*messages, {"role": "user", "content": f"{instruction}\n{words}" if instruction else words}]
            count = await self._tokenizer.chat(whole)
            if count == wanted or size + wanted - count < 1:
                break
            size += wanted - count
        return self._prepared(ask, run, "chat", {"messages": whole}, options, count)

    def _prepared(
        self,
        ask: PlannedRequest,
        run: int,
        route: Route,
        prompt: Mapping[str, Any],
        options: Mapping[str, Any],
        tokens: int,
    ) -> Prepared:
        name = request_id(self._bench, run, ask.number)
        body: dict[str, Any] = {"model": self._model, **prompt, "max_tokens": ask.output_tokens, **options}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if ask.temperature is not None:
            body["temperature"] = ask.temperature
        if ask.json_schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": dict(ask.json_schema)},
            }
        return Prepared(ask, name, ROUTES[route], _encode(body), tokens)


def _role(key: str) -> str:
    """Return the role of a segment, by the end of its key."""
    return "assistant" if key.endswith(":answer") else "user" if key.endswith(":prompt") else "system"

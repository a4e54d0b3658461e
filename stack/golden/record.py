"""Recording of a baseline: the answers of an engine at several batch sizes, and the noise between them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from exporters.engine.client import EngineClient
from exporters.net.http_client import HttpClientConfig
from stack.golden.baseline import Baseline, GoldenError, GoldenPrompt, GreedyText
from stack.golden.check import base_url
from stack.golden.client import (
    ANSWER_S,
    CHAT,
    COMPLETIONS,
    GoldenClient,
    GreedyTokens,
    NotFinite,
    PromptScore,
    served_models,
)
from stack.golden.comparison import TokenNoise, learn, logit_bits
from stack.golden.prompts import LONGEST_TOKENS, PromptSet

LEVELS = (1, 2, 4, 8, 16, 32)  # requests at once: kernels choose their reductions by the size of the batch
GREEDY_PROMPTS = 2
COMPANY_TOKENS = 16  # output of each request beside the measured one


class _Recorded(NamedTuple):
    """Prompt before it was scored."""

    name: str
    text: str
    text_ids: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlan:
    """Scope of a record. runs: of all prompts, shared out over `levels`; learned noise needs 12 or more. route: None
    for completions, or chats where there are none."""

    prompts: PromptSet
    model: str | None = None
    route: str | None = None
    runs: int = 24
    levels: tuple[int, ...] = LEVELS


async def record(
    url: str,
    plan: RecordPlan,
    *,
    key: str | None = None,
    http_config: HttpClientConfig | None = None,
    probe_log: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Baseline:
    """Return the baseline of an engine. Raises GoldenError, also for an engine that is damaged already."""
    async with aiohttp.ClientSession() as session:
        engine = EngineClient(session, base_url(url), ANSWER_S, http_config, key)
        client = GoldenClient(engine, await _model(engine, plan.model), probe_log=probe_log)
        try:
            return await _record(client, plan, progress)
        except NotFinite as error:
            raise GoldenError(f"{engine.url} is damaged already: {error}; record a healthy engine") from None


async def _model(engine: EngineClient, name: str | None) -> str:
    served = [each.id for each in await served_models(engine)]
    if name is not None and name not in served:
        raise GoldenError(f"{engine.url} serves {', '.join(sorted(served))}, not {name}")
    return name or served[0]


async def _record(client: GoldenClient, plan: RecordPlan, progress: Callable[[str], None]) -> Baseline:
    identity = await client.identity()
    options = plan.prompts.template_options
    conversation_ids = await client.chat_ids(plan.prompts.conversation, options) if plan.prompts.conversation else None
    route, prompts = await _prompts(client, plan)
    before = client.tokens
    levels = dict[int, list[list[PromptScore]]]()
    texts = list[list[GreedyTokens | None]]()
    for level, runs in shares(plan.runs, plan.levels).items():
        progress(f"{runs} runs of {len(prompts)} prompts with {level} requests at once")
        async with _company(client, route, prompts, level - 1):
            levels[level] = [await client.score_all(route, prompts, options) for _ in range(runs)]
            texts.append([await client.greedy(prompt.ids) for prompt in prompts[:GREEDY_PROMPTS]])
        if level == plan.levels[0]:
            run_tokens = (client.tokens - before) // runs
    alone = levels[plan.levels[0]][0]
    noise, limits = learn({level: [[one.own for one in run] for run in runs] for level, runs in levels.items()})
    return Baseline(
        recorded=datetime.now(UTC).isoformat(timespec="seconds"),
        route=route,
        engine=msgspec.structs.replace(identity, logit_bits=logit_bits([gap for one in alone for gap in one.gaps])),
        prompts=tuple(_prompt(*parts) for parts in zip(prompts, alone, noise, strict=True)),
        greedy=tuple(
            GreedyText(prompt=prompt.name, tokens=text.tokens, gaps=text.gaps)
            for prompt, text in zip(prompts, texts[0], strict=False)
            if text is not None
        ),
        greedy_varies=any(text != texts[0] for text in texts),
        conversation=plan.prompts.conversation,
        conversation_ids=conversation_ids,
        template_options=options,
        top_logprobs=client.top_logprobs,
        limits=limits,
        levels=tuple(levels),
        runs=plan.runs,
        tokens=run_tokens,
    )


def _prompt(prompt: _Recorded, alone: PromptScore, noise: TokenNoise) -> GoldenPrompt:
    return GoldenPrompt(**prompt._asdict(), alone=alone.own, best=alone.best, noise=noise)


def shares(runs: int, levels: Sequence[int]) -> dict[int, int]:
    """Share runs out over batch sizes; earlier ones get what is left."""
    return {level: len(range(place, runs, len(levels))) for place, level in enumerate(levels)}


async def _prompts(client: GoldenClient, plan: RecordPlan) -> tuple[str, list[_Recorded]]:
    """Return the route and the prompts with their tokens. Raises GoldenError for prompts that are too long."""
    found = list[_Recorded]()
    route = plan.route or (COMPLETIONS if await client.offers_completions() else CHAT)
    for prompt in plan.prompts.prompts:
        ids = text_ids = await client.text_ids(prompt.text)
        if route == CHAT:
            message = ({"role": "user", "content": prompt.text},)
            ids = await client.chat_ids(message, plan.prompts.template_options) or ()
        if not ids:
            raise GoldenError(f"{client.engine.url} reports no token ids, neither by /tokenize nor by return_token_ids")
        if len(ids) > LONGEST_TOKENS and not plan.prompts.cut:
            raise GoldenError(f"prompt {prompt.name!r} has {len(ids)} tokens; shorten it to {LONGEST_TOKENS}")
        if route == CHAT and len(ids) > LONGEST_TOKENS:
            continue  # a message cannot be cut by tokens
        found.append(_Recorded(prompt.name, prompt.text, text_ids, ids[:LONGEST_TOKENS]))
    if not found:
        raise GoldenError(f"every prompt has more than {LONGEST_TOKENS} tokens by the chat route; give shorter ones")
    return route, found


@contextlib.asynccontextmanager
async def _company(client: GoldenClient, route: str, prompts: Sequence[_Recorded], count: int) -> AsyncIterator[None]:
    """Keep `count` plain requests of different lengths running, and let them end."""
    stop = asyncio.Event()

    async def keep_asking(number: int) -> None:
        for turn in itertools.count(number):
            if stop.is_set():
                return
            prompt = prompts[turn % len(prompts)]
            await client.keep_busy(route, prompt.ids[: 8 + turn * 7 % len(prompt.ids)], prompt.text, COMPANY_TOKENS)

    tasks = [asyncio.create_task(keep_asking(number)) for number in range(count)]
    try:
        yield
    finally:
        stop.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    if failed := next((result for result in results if isinstance(result, BaseException)), None):
        raise failed

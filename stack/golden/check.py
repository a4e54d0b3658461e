"""Check of an engine against a baseline of golden prompts."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import aiohttp
import msgspec

from exporters.engine.client import EngineClient
from exporters.engine.golden_state import GoldenResult, GoldenVerdict
from exporters.net.http_client import HttpClientConfig
from stack.golden import baseline as baselines
from stack.golden.baseline import Baseline, EngineIdentity, GoldenError
from stack.golden.client import ANSWER_S, GoldenClient, GreedyTokens, NotFinite
from stack.golden.comparison import CHECK_RUNS, logit_bits
from stack.golden.verdict import GoldenDecision, Observation, decide, equal_to_record

_SIZES = ("mean_abs", "p99", "max_abs", "z2", "max_z")
MOST_RUNS = 2 * CHECK_RUNS  # of a check whose first verdict is not `same`


async def check_engine(
    url: str,
    baseline: Baseline | Path,
    *,
    key: str | None = None,
    http_config: HttpClientConfig | None = None,
    probe_log: Path | None = None,
    session: aiohttp.ClientSession | None = None,
) -> GoldenResult:
    """Compare the engine at a URL with a baseline, or with that in a file.

    Sends one prompt at a time: once where every bit is as recorded, else CHECK_RUNS times, and twice that before
    numbers are called anything but the same. probe_log: gets a record for each request. Raises GoldenError with one
    sentence where nothing can be compared."""
    known = baselines.load(baseline) if isinstance(baseline, Path) else baseline
    if session is None:
        async with aiohttp.ClientSession() as own:
            return await check_engine(url, known, key=key, http_config=http_config, probe_log=probe_log, session=own)
    began = time.monotonic()
    engine = EngineClient(session, base_url(url), ANSWER_S, http_config, key)
    client = GoldenClient(engine, known.engine.model, known.top_logprobs, probe_log)
    try:
        decision, identity = await _decided(client, known)
    except GoldenError as error:
        error.tokens = client.tokens
        raise
    found = decision.difference
    sizes = {} if found is None else {name: getattr(found, name) for name in _SIZES}
    return GoldenResult(
        address=client.address,
        model=client.model,
        verdict=decision.verdict,
        cause=decision.cause,
        sentence=decision.sentence,
        at_s=time.time(),
        seconds=round(time.monotonic() - began, 3),
        tokens=client.tokens,
        requests=client.requests,
        first=decision.first,
        version=identity.version,
        **sizes,
    )


def base_url(url: str) -> str:
    """Return scheme, host and port of an engine's URL. Raises GoldenError."""
    base = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
    if not base.startswith(("http://", "https://")) or "@" in base:
        shown = "what stands there" if "@" in base else repr(base)  # a login is shown nowhere
        raise GoldenError(
            f"{shown} is no URL of an engine; write it like http://127.0.0.1:8000, and give a key by file"
        )
    return base


async def _decided(client: GoldenClient, baseline: Baseline) -> tuple[GoldenDecision, EngineIdentity]:
    seen = Observation(await client.identity())
    tokenized = {
        prompt.name: ids
        for prompt in baseline.prompts
        if prompt.text_ids and (ids := await client.text_ids(prompt.text)) and ids != prompt.text_ids
    }
    if tokenized:
        return decide(baseline, dataclasses.replace(seen, tokenized=tokenized)), seen.engine
    if baseline.conversation_ids is not None:
        rendered = await client.chat_ids(baseline.conversation, baseline.template_options)
        if rendered != baseline.conversation_ids:
            return decide(baseline, dataclasses.replace(seen, rendered=rendered or ())), seen.engine
    try:
        return await _numbers(client, baseline, seen)
    except NotFinite as error:
        return decide(baseline, dataclasses.replace(seen, not_finite=str(error))), seen.engine


async def _numbers(
    client: GoldenClient, baseline: Baseline, seen: Observation
) -> tuple[GoldenDecision, EngineIdentity]:
    runs = [await client.score_all(baseline.route, baseline.prompts, baseline.template_options)]
    greedy = await _greedy(client, baseline)
    engine = msgspec.structs.replace(seen.engine, logit_bits=logit_bits([gap for one in runs[0] for gap in one.gaps]))
    if equal_to_record(baseline, runs[0]):
        decision = decide(baseline, Observation(engine, runs=runs, greedy=greedy))
        if decision.verdict is GoldenVerdict.SAME:
            return decision, engine
    while True:
        most = CHECK_RUNS if len(runs) < CHECK_RUNS else MOST_RUNS
        while len(runs) < most:
            runs.append(await client.score_all(baseline.route, baseline.prompts, baseline.template_options))
        decision = decide(baseline, Observation(engine, runs=runs[-CHECK_RUNS:], greedy=greedy))
        if decision.verdict is GoldenVerdict.SAME or len(runs) == MOST_RUNS:
            return decision, engine
        greedy = await _greedy(client, baseline)


async def _greedy(client: GoldenClient, baseline: Baseline) -> list[GreedyTokens | None]:
    prompts = {prompt.name: prompt.ids for prompt in baseline.prompts}
    return [await client.greedy(prompts[one.prompt]) for one in baseline.greedy]

"""Advice before there is traffic: expectations for a workload, and the lever for a goal. Decision tables, each row with
what measures it.

Invariant: a hit band is written down once, in the included workload that measures it (`expected_hit` in
stack/bench/workloads); here it is read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from stack.bench import workload_file
from stack.bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Workload and its lever. words: search terms. measure: metrics of a bench. benches: included workloads that
    measure it.

    row: of the tuning matrix, once it runs. scenario: of the prefix cache. dated: outdated advice of older guides, and
    what holds now."""

    name: str
    title: str
    words: tuple[str, ...]
    bottleneck: str
    lever: str
    second: str
    measure: tuple[str, ...]
    benches: tuple[str, ...]
    row: str
    scenario: str = ""
    dated: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Scenario of the prefix cache. title: as in the included workload. same, changes: parts of a prompt. impact: on
    the time to first token."""

    title: str
    words: tuple[str, ...]
    same: str
    changes: str
    impact: str
    row: str

    @property
    def bench(self) -> Workload:
        return _by_scenario()[self.title]

    @property
    def expected_hit(self) -> tuple[float, float]:
        """Lowest and highest expected hit ratio, 0 to 1."""
        low, high = self.bench.expected_hit or (0.0, 1.0)
        return low, high


@cache
def _by_scenario() -> Mapping[str, Workload]:
    return {
        one.scenario: one
        for path in workload_file.included().values()
        for one in workload_file.load(path).workloads
        if one.scenario
    }


WORKLOADS: tuple[Advice, ...] = (
    Advice(
        name="long-context-edits",
        title="Long repository context, small edits",
        words=("repository", "repo", "context", "edits", "codebase", "refactor"),
        bottleneck="prefill: the same long beginning is computed for every edit",
        lever=(
            "Keep the beginning the same byte for byte, so that the prefix cache (on by default) has it; the edit comes"
            " last."
        ),
        second=(
            "Keep a repository's requests on one engine; chunked prefill (on by default) keeps others moving meanwhile."
        ),
        measure=("ttft_ms", "hit_ratio"),
        benches=("same-codebase", "shared-prefix"),
        row="unique-prompts",
        scenario="Repeated analysis on the same codebase",
        dated=(
            "Older guides begin with --enable-prefix-caching and --enable-chunked-prefill: both are the default of"
            " current vLLM."
        ),
    ),
    Advice(
        name="short-queries",
        title="Many short queries",
        words=("short", "queries", "many", "batch", "classification", "throughput"),
        bottleneck="how full the batches are: the GPU waits for work",
        lever=(
            "`--max-num-seqs` as high as the cache holds at the lengths you expect; `vllm-watch capacity` says how"
            " many."
        ),
        second="Admission in front (the gateway's `slots`), so that a burst queues where teams have shares.",
        measure=("tokens_per_second", "qps", "queue_ms"),
        benches=("short-short",),
        row="queue-bound",
        dated=(
            "Continuous batching is no option: vLLM always does it. The default of --max-num-seqs is 1024 on H100, H200"
            " and larger."
        ),
    ),
    Advice(
        name="long-among-short",
        title="Summaries of long documents beside short code",
        words=("mixed", "summarization", "summaries", "documents", "long", "files"),
        bottleneck="long prefills that others wait behind",
        lever="Cap a long prompt's part of a step: `--long-prefill-token-threshold` at a quarter of what a step holds.",
        second="An engine of their own for long prompts; then disaggregated prefill, which is experimental.",
        measure=("short:ttft_ms.p95", "tpot_ms.p95", "queue_ms"),
        benches=("head-of-line", "mixed-burst"),
        row="head-of-line-first",
        dated="Chunked prefill is on by default; what is left to choose is how much of a step a long prompt may take.",
    ),
    Advice(
        name="interactive-coding",
        title="Interactive coding assistant",
        words=("coding", "assistant", "interactive", "autocomplete", "completion", "copilot", "ide", "chat"),
        bottleneck="the wait that a person feels: the first token, then the pace of the rest",
        lever=(
            "`--speculative-config` with n-gram drafts: code repeats itself, so answers come faster at the few requests"
            " that run at once."
        ),
        second="A smaller `max_tokens`, which ends answers earlier; for the first token itself, shorter prompts.",
        measure=("tpot_ms", "e2e_ms", "ttft_ms"),
        benches=("coding-qa",),
        row="decode-bound",
        dated="Drafts make the pace better and leave the time to first token as it is; look at both.",
    ),
    Advice(
        name="strict-json",
        title="Strict JSON or tool calls",
        words=("json", "strict", "tool", "tools", "structured", "schema", "function"),
        bottleneck="answers that a parser cannot read, and are asked for again",
        lever=(
            "Have the engine hold the answer to a schema: `response_format` with json_schema in the request; for tools"
            " `--tool-call-parser`."
        ),
        second=(
            "A flatter schema, where it costs time or quality: compare the share of good answers, not only of valid"
            " ones."
        ),
        measure=("invalid_json_ratio", "score"),
        benches=("json-output",),
        row="deferred-requests",
        dated=(
            "--guided-decoding-backend is gone; --structured-outputs-config has taken its place, and nothing must be"
            " set for it to work."
        ),
    ),
    Advice(
        name="ralph-loop",
        title="Agent that runs in a loop on one prompt file",
        words=("ralph", "loop", "agent", "agents", "capstone", "prompt.md"),
        bottleneck="the same prefill, turn after turn",
        lever=(
            "Keep the prompt file first and unchanged, so that the prefix cache (on by default) has it; logs and times"
            " come last."
        ),
        second="Chunked prefill (on by default) for its longest turns; a loop's turns on one engine.",
        measure=("ttft_ms", "hit_ratio"),
        benches=("agent-loop",),
        row="unique-prompts",
        scenario="Ralph loop with the same PROMPT.md",
    ),
)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        title="Ralph loop with the same PROMPT.md", words=("ralph", "loop", "agent", "agents", "prompt.md"),
        same="long, 3,000 to 8,000 tokens",
        changes="little from turn to turn", impact="very large", row="unique-prompts",
    ),
    Scenario(
        title="Multi-tenant chatbot with shared system prompt",
        words=("chatbot", "chat", "tenant", "tenants", "multi-tenant", "support", "system"),
        same="500 to 2,000 tokens for each tenant", changes="the user's message and history", impact="moderate",
        row="unique-prompts",
    ),
    Scenario(
        title="RAG with new chunks each time", words=("rag", "retrieval", "chunks", "documents", "search"), same="tiny",
        changes="most of the prompt",
        impact="almost none", row="prefill-bound",
    ),
    Scenario(
        title="Repeated analysis on the same codebase",
        words=("codebase", "analysis", "repository", "repo", "review", "diff"),
        same="very long, 10,000 tokens and more", changes="only the diff", impact="very large", row="unique-prompts",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of tuning, with the row of the tuning matrix that proves success."""

    name: str
    title: str
    lever: str
    second: str
    row: str


GOALS: tuple[Goal, ...] = (
    Goal(
        "ttft",
        "Earlier first tokens",
        "Send fewer prompt tokens, or put what prompts share at their beginning, where the prefix cache finds it.",
        "More engines; disaggregated prefill, which is experimental, only where prefill and decode still disturb each"
        " other.",
        "prefill-bound",
    ),
    Goal(
        "itl",
        "Faster answers",
        "Several tokens a step: `--speculative-config`, n-gram drafts first.",
        "A smaller or quantized model after a check of quality; then engines that only decode, or GPUs with more"
        " bandwidth.",
        "decode-bound",
    ),
    Goal(
        "context",
        "Longer contexts",
        "Fewer at once: `--max-num-seqs` as low as the longer requests need; or a GPU with more memory.",
        "`--kv-cache-dtype fp8` after a check of quality.",
        "kv-bound",
    ),
    Goal(
        "throughput",
        "More tokens per second",
        "Admission: as many at once as the cache holds and no more, by the gateway's `slots`.",
        "`--tensor-parallel-size` where one GPU does not hold model and cache; else more engines.",
        "queue-at-capacity",
    ),
    Goal(
        "adapters",
        "Many adapters",
        "Route each adapter to few engines, and check that its rank and modules fit what the engine was started for.",
        "Engines of their own for adapters that are large or busy; then `--max-loras` higher.",
        "deferred-requests",
    ),
)


def goal(name: str) -> Goal:
    """Return the goal of this name. Raises ValueError with the known names."""
    found = next((one for one in GOALS if one.name == name), None)
    if found is None:
        raise ValueError(f"{name!r} is no goal; there are {', '.join(one.name for one in GOALS)}")
    return found


NAMES = ", ".join((*(one.name for one in WORKLOADS), *(one.words[0] for one in SCENARIOS[1:])))


def meant(words: str) -> tuple[tuple[Advice, ...], tuple[Scenario, ...]]:
    """Find the rows of both tables that match free words best, with their counterparts. Raises ValueError, with the
    nearest names, where none matches."""
    asked = _words(words)
    rows: tuple[Advice | Scenario, ...] = (*WORKLOADS, *SCENARIOS)
    scores = {row: sum(_names(row, word) for word in asked) for row in rows}
    best = max(scores.values())
    named = {row for row, score in scores.items() if score > best / 2}
    titles = {one.title if isinstance(one, Scenario) else one.scenario for one in named}
    advice = tuple(one for one in WORKLOADS if one in named or one.scenario in titles - {""})
    scenarios = tuple(one for one in SCENARIOS if one.title in titles)
    if not best:
        known = sorted({*(one.name for one in WORKLOADS), *(word for one in SCENARIOS for word in one.words)})
        near = list(
            dict.fromkeys(
                name
                for word in (words.lower(), *asked)
                for name in difflib.get_close_matches(word, known, n=3, cutoff=0.5)
            )
        )
        names = ", ".join(near) or NAMES
        raise ValueError(
            f"no workload is known by {words!r}; " + ("the nearest names are " if near else "there are ") + names
        )
    return advice, scenarios


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", text.lower())


def _names(row: Advice | Scenario, word: str) -> int:
    """Return the score of a word: 2 for a search term, 1 for a word of the title."""
    if word in row.words or (isinstance(row, Advice) and word in row.name.split("-")):
        return 2
    return int(len(word) > 3 and word in _words(row.title))

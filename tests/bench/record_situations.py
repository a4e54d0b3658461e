"""Records labelled situations of a real vLLM on the CPU for the tests of the doctor: `PYTHONPATH=. python
tests/bench/record_situations.py [NAME...]`.

Each is a folder below tests/situations: the page of one engine before and after some seconds of load, those of the
gateway and its request log where it takes part, and situation.yaml, which says what the doctor must find; looks.prom
holds what the doctor reads every two seconds between the pages. A recording whose figures do not show what its label
says is not written. Situations with like flags that follow each other share an engine, so its counters hold what was
there before: only what grew between the two pages tells of the situation. Prompts are random token ids; nothing of them
is kept."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from exporters.catalogue import exposition_parser, vllm
from exporters.catalogue.exposition_parser import Exposition
from exporters.catalogue.metric import Metric
from exporters.requests.record import ended_at, parse_line
from stack.doctor import series
from stack.lab import supervisor
from stack.lab.install.engine import VLLM
from tests.support.engines import Engine, get, started
from tests.support.live_gateway import Gate, running
from tests.support.load_generator_pair import engine_parts
from tests.support.ports import free_port
from tests.support.situation_load import Clients, Load, core_of

FOLDER = Path(__file__).parents[1] / "situations"
MADE_WITH = f"vLLM {VLLM}, CPU, tiny random model"
LOG_LINES = 500
LOOK_S = 2.0  # between two looks at the gauges, of which the pages keep only two
Bounds = tuple[float, float]
MORE = float("inf")


# ---- what a situation is


@dataclass(frozen=True, slots=True)
class Situation:
    """label: what the doctor must find; also: what is true as well and no mistake. tells: figures with their bounds,
    without which the label is not deserved. policy: of the gateway in front, None for none. quiet: the load ends before
    the first page. frozen: the engine's core stands still from before the first page. restarted: the engine is killed
    and started again between the pages. stops_s: the core stops so many seconds after the first page; with api_stops
    the API server does instead, and the last page is the last one that it answered. serious: False where the finding is
    a note."""

    name: str
    label: str
    load: str
    clients: tuple[Clients, ...]
    tells: Mapping[str, Bounds]
    flags: tuple[str, ...] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    policy: Mapping[str, Any] | None = None
    warm_up_s: float = 6.0
    seconds: float = 24.0
    quiet: bool = False
    frozen: bool = False
    restarted: bool = False
    stops_s: float | None = None
    api_stops: bool = False
    serious: bool = True

    @property
    def spoils(self) -> bool:
        """Whether its engine is of no use to the next one."""
        return self.frozen or self.restarted or self.stops_s is not None


DEMO: Mapping[str, Any] = {"teams": {"demo": {}}, "upstreams": {"engine": {"url": "{engine}"}}}
LIMITS: Mapping[str, Any] = {**DEMO, "teams": {"demo": {}, "crowd": {"max_in_flight": 2}}}
NARROW: Mapping[str, Any] = {**DEMO, "capacity": {"slots": 3}}
SHARED: Mapping[str, Any] = {**DEMO, "teams": {"demo": {}, "crowd": {}}, "capacity": {"slots": 8}}
SMALL_CACHE = ("--max-model-len", "2048", "--num-gpu-blocks-override", "96")
MIDDLE_CACHE = ("--max-model-len", "4096", "--num-gpu-blocks-override", "256", "--max-num-seqs", "64")
ALONE = ("--max-num-seqs", "15")  # as the lab has it, but an engine of its own
MANY, FEW = ("--max-num-seqs", "96"), ("--max-num-seqs", "4")
LONG_STEPS = ("--max-num-batched-tokens", "32768", "--no-enable-chunked-prefill", "--no-enable-prefix-caching")
NO_CACHE = ("--no-enable-prefix-caching",)
QUICK: Mapping[str, float] = {"queue_time_p95": 0.5, "ttft_p95": 0.75}  # for a model that is as small as this one
SMALL_STEPS = ("--max-num-batched-tokens", "256")
ADAPTERS = "{adapters}"  # the folder of two of them
LORA = (
    "--enable-lora",
    "--max-loras",
    "1",
    "--max-lora-rank",
    "8",
    "--lora-modules",
    f"one={ADAPTERS}/one",
    f"two={ADAPTERS}/two",
)
DRAFTS = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}',
)

CHAT = Clients(3, (100, 300), (20, 80), shared=64, pause_s=0.6)
FINE: Mapping[str, Bounds] = {
    "ttft_p95": (0, 1), "inter_token_p95": (0, 0.05), "queue_p95": (0, 0.3), "preemptions": (0, 0),
    "waiting_max": (0, 1),
}  # fmt: skip
NO_QUEUE: Mapping[str, Bounds] = {"queue_mean": (0, 0.2), "preemptions": (0, 0), "kv_max": (0, 0.5)}

SITUATIONS = (
    # as the lab starts it: 16 sequences, steps of 2,048 tokens
    Situation(
        "none-idle-2",
        "none",
        "a new engine that nobody has asked anything",
        (),
        {"requests": (0, 0)},
        warm_up_s=1,
        seconds=15,
    ),
    Situation(
        "none-healthy",
        "none",
        "3 clients that pause, prompts with a common beginning, short answers",
        (CHAT,),
        {**FINE, "requests": (30, MORE), "hit_ratio": (0.2, 1)},
    ),
    Situation(
        "none-healthy-2",
        "none",
        "5 clients that pause longer, two thirds of each prompt the same, longer answers, through a gateway",
        (Clients(5, (450, 700), (60, 160), shared=384, pause_s=2.5),),
        {**FINE, "requests": (20, MORE), "hit_ratio": (0.5, 1)},
        policy=DEMO,
    ),
    Situation(
        "abstain-thin",
        "abstain",
        "one client that asks once in eight seconds",
        (Clients(1, (100, 300), (20, 80), pause_s=8),),
        {"requests": (2, 5)},
    ),
    Situation(
        "abstain-thin-2",
        "abstain",
        "as before, with prompts of 8,000 to 9,000 tokens, so that each first token is late",
        (Clients(1, (8000, 9000), (1, 4), pause_s=7),),
        {"requests": (2, 5)},
    ),
    Situation(
        "prefill-bound",
        "prefill-bound",
        "one client, prompts of 2,500 to 3,500 tokens of which 1,280 are the same, answers of 1 to 4 tokens",
        (Clients(1, (2500, 3500), (1, 4), shared=1280, pause_s=0.2),),
        {**NO_QUEUE, "ttft_p95": (0.3, MORE), "requests": (20, MORE)},
        thresholds={"ttft_p95": 0.25},
    ),
    Situation(
        "unique-prompts",
        "unique-prompts",
        "4 clients, prompts of 1,500 to 3,000 tokens of which none comes twice, answers of 8 to 16 tokens",
        (Clients(4, (1500, 3000), (8, 16), pause_s=1.0),),
        {"queue_mean": (0, 0.2), "hit_ratio": (0, 0.02), "ttft_p95": (0.5, MORE)},
        thresholds={"ttft_p95": 0.5},
    ),
    Situation(
        "unique-prompts-2",
        "unique-prompts",
        "6 clients that pause, prompts of 600 to 1,000 tokens of which none comes twice, answers of 2 to 6",
        (Clients(6, (600, 1000), (2, 6), pause_s=1.0),),
        {**NO_QUEUE, "hit_ratio": (0, 0.02), "ttft_p95": (0.5, MORE)},
        thresholds={"ttft_p95": 0.5},
    ),
    Situation(
        "client-disconnects",
        "client-disconnects",
        "6 clients that close the stream after 5 to 60 pieces of some hundreds, beside 3 that stay, through a gateway",
        (Clients(6, (60, 200), (300, 500), pause_s=1.0, hang_up=(5, 60)), CHAT),
        {"begun_less_ended": (20, MORE), "log: client_abort": (20, MORE)},
        policy=DEMO,
    ),
    Situation(
        "client-disconnects-2",
        "client-disconnects",
        "8 clients, asked directly, that close the stream after 1 to 20 pieces of some hundreds",
        (Clients(8, (60, 200), (200, 400), pause_s=0.8, hang_up=(1, 20)), CHAT),
        {"begun_less_ended": (40, MORE), "requests": (20, MORE)},
    ),
    Situation(
        "rejections-2",
        "rejections",
        "6 clients of a team that may have 2 requests under way, beside 3 of another, through a gateway",
        (Clients(6, (60, 200), (60, 120), pause_s=0.7, team="crowd"), CHAT),
        {"log: rejected team_limit": (30, MORE), "rejected_by_engine": (0, 0)},
        policy=LIMITS,
    ),
    Situation(
        "gateway-queue",
        "gateway-queue",
        "12 clients behind a gateway that lets 3 requests through at once",
        (Clients(12, (60, 200), (40, 80)),),
        {"running_max": (0, 3), "waiting_max": (0, 0), "requests": (30, MORE)},
        policy=NARROW,
        thresholds={"queue_time_p95": 0.5},
    ),
    Situation(
        "gateway-queue-2",
        "gateway-queue",
        "24 clients of one team and 2 of another behind a gateway that lets 8 requests through at once",
        (Clients(24, (60, 200), (60, 120), team="crowd"), Clients(2, (100, 300), (20, 80), pause_s=0.6)),
        {"running_max": (0, 8), "waiting_max": (0, 1), "requests": (30, MORE)},
        policy=SHARED,
        thresholds={"queue_time_p95": 0.5},
        also=("one-team",),
    ),
    Situation(
        "wrong-requests",
        "wrong-requests",
        "2 clients that ask for a model that is not served, beside 3 that ask for the right one",
        (Clients(2, (60, 200), (20, 80), pause_s=0.6, model="large"), CHAT),
        {"wrong": (20, MORE), "requests": (30, MORE)},
    ),
    Situation(
        "none-idle",
        "none",
        "nobody asks; a minute before 60 clients had waited in a long queue",
        (Clients(60, (60, 200), (150, 250)),),
        {"requests": (0, 0), "running_max": (0, 0)},
        warm_up_s=20,
        quiet=True,
    ),
    Situation(
        "frozen-engine",
        "frozen-engine",
        "9 clients; the core stopped with their requests under way and the page still answers",
        (Clients(6, (60, 200), (300, 500)), CHAT),
        {"requests": (0, 0), "running_max": (4, 16), "output_tokens_per_s": (0, 0)},
        frozen=True,
    ),
    # few at once
    Situation(
        "queue-bound",
        "queue-bound",
        "48 clients on 4 sequences, short prompts, answers of 200 to 400 tokens",
        (Clients(48, (40, 120), (200, 400)),),
        {"queue_p95": (5, MORE), "prefill_p95": (0, 0.5), "kv_max": (0, 0.3)},
        FEW,
        warm_up_s=15,
    ),
    Situation(
        "queue-bound-3",
        "queue-bound",
        "14 clients on 4 sequences, half of each prompt the same, answers of 60 to 160 tokens",
        (Clients(14, (200, 500), (60, 160), shared=192),),
        {"queue_mean": (0.5, MORE), "prefill_mean": (0, 0.3), "kv_max": (0, 0.3)},
        FEW,
        thresholds={"queue_time_p95": 0.6, "ttft_p95": 0.75},
    ),
    Situation(
        "restart",
        "none",
        "6 clients that pause; the engine is killed and started again between the pages",
        (CHAT, CHAT),
        {"requests": (5, MORE)},
        ALONE,
        also=("abstain",),
        warm_up_s=15,
        restarted=True,
    ),
    Situation(
        "frozen-engine-2",
        "frozen-engine",
        "12 clients on 4 sequences; the core stopped, so that some requests run and others wait for ever",
        (Clients(12, (60, 200), (300, 500)),),
        {"requests": (0, 0), "running_max": (4, 4), "waiting_max": (8, 8)},
        FEW,
        frozen=True,
    ),
    Situation(
        "queue-bound-2",
        "queue-bound",
        "20 clients on 2 sequences, prompts of 300 to 800 tokens, answers of 60 to 120",
        (Clients(20, (300, 800), (60, 120)),),
        {"queue_p95": (2.5, MORE), "prefill_mean": (0, 0.3), "kv_max": (0, 0.3)},
        ("--max-num-seqs", "2"),
        thresholds={"queue_time_p95": 2.5},
        warm_up_s=10,
    ),
    # a cache that is too small
    Situation(
        "kv-bound",
        "kv-bound",
        "16 clients whose answers outgrow a cache of 96 blocks",
        (Clients(16, (100, 200), (300, 500)),),
        {"preemptions": (20, MORE), "kv_max": (0.9, 1)},
        SMALL_CACHE,
        also=("queue-bound",),
    ),
    Situation(
        "kv-bound-2",
        "kv-bound",
        "30 clients that pause, a third of each prompt the same, answers of 200 to 500 tokens, a cache of 256 blocks",
        (Clients(30, (300, 500), (200, 500), shared=128, pause_s=1.0),),
        {"preemptions": (20, MORE), "kv_max": (0.9, 1)},
        MIDDLE_CACHE,
        also=("queue-bound",),
        warm_up_s=10,
    ),
    # many at once
    Situation(
        "decode-bound",
        "decode-bound",
        "80 clients on 96 sequences, short prompts, answers of 300 to 600 tokens",
        (Clients(80, (30, 60), (300, 600)),),
        {**NO_QUEUE, "inter_token_p95": (0.05, MORE), "requests": (20, MORE)},
        MANY,
        thresholds={"inter_token_p95": 0.05},
        warm_up_s=10,
    ),
    Situation(
        "decode-bound-2",
        "decode-bound",
        "24 clients on 96 sequences, prompts of 2,000 tokens that are nearly all the same, answers of 200 to 400",
        (Clients(24, (2048, 2100), (200, 400), shared=2000),),
        {**NO_QUEUE, "inter_token_p95": (0.025, MORE), "requests": (20, MORE)},
        MANY,
        thresholds={"inter_token_p95": 0.025},
        warm_up_s=10,
    ),
    # each is long in a way of its own
    Situation(
        "prefill-bound-2",
        "prefill-bound",
        "3 clients that pause, prompts of 3,500 to 5,000 tokens of which 1,600 are the same, in turns of 256",
        (Clients(3, (3500, 5000), (1, 4), shared=1600, pause_s=0.5),),
        {**NO_QUEUE, "ttft_p95": (0.4, MORE), "requests": (15, MORE)},
        ("--long-prefill-token-threshold", "256"),
        thresholds={"ttft_p95": 0.25},
    ),
    Situation(
        "cache-off",
        "cache-off",
        "2 clients that pause, prompts of 4,000 tokens that are nearly all the same, answers of 10 to 30",
        (Clients(2, (4000, 4200), (10, 30), shared=3900, pause_s=0.8),),
        {"queue_mean": (0, 1), "ttft_p95": (0.25, MORE), "requests": (15, MORE)},
        ("--no-enable-prefix-caching",),
        thresholds={"ttft_p95": 0.25},
        also=("prefill-bound",),
    ),
    Situation(
        "cache-off-2",
        "cache-off",
        "4 clients that pause, prompts of 2,000 tokens that begin alike, answers of 40 to 80",
        (Clients(4, (1900, 2100), (40, 80), shared=1700, pause_s=0.8),),
        {"queue_mean": (0, 1), "ttft_p95": (0.5, MORE), "requests": (20, MORE)},
        ("--no-enable-prefix-caching",),
        thresholds={"ttft_p95": 0.5},
        also=("prefill-bound",),
    ),
    Situation(
        "head-of-line",
        "head-of-line",
        "8 clients with short requests behind one whose prompts of 8,000 to 10,000 tokens are a step each; a gateway",
        (Clients(8, (40, 80), (10, 20), pause_s=0.8), Clients(1, (8000, 10000), (1, 2), pause_s=1.2)),
        {"ttft_p95": (0.5, MORE), "running_max": (0, 12), "requests": (40, MORE)},
        LONG_STEPS,
        policy=DEMO,
        thresholds={"ttft_p95": 0.5},
        also=("cache-off", "prefill-bound"),
    ),
    Situation(
        "head-of-line-2",
        "head-of-line",
        "6 clients with short requests beside one whose prompts of 4,000 to 5,000 tokens fit into one step each",
        (Clients(6, (60, 200), (12, 24), pause_s=0.6), Clients(1, (4000, 5000), (1, 2), pause_s=1.5)),
        {"ttft_p95": (0.25, MORE), "running_max": (0, 12), "requests": (40, MORE)},
        ("--max-num-batched-tokens", "16384"),
        thresholds={"ttft_p95": 0.25},
        also=("unique-prompts", "prefill-bound"),
    ),
    Situation(
        "rejections",
        "rejections",
        "20 clients that do not back off, of which the engine takes 8",
        (Clients(20, (60, 200), (60, 120), pause_s=0.4),),
        {"rejected_by_engine": (60, MORE), "requests": (20, MORE)},
        ("--max-num-queued-reqs", "8"),
    ),
    Situation(
        "spec-decode",
        "speculative-decoding",
        "4 clients that pause, text at random, five tokens drafted by n-gram at each step",
        (Clients(4, (100, 300), (50, 100), pause_s=0.3),),
        {"accepted_ratio": (0, 0.3), "requests": (20, MORE)},
        DRAFTS,
        warm_up_s=25,
    ),
    Situation(
        "deferred",
        "deferred-requests",
        "4 clients of one adapter and 4 of another on an engine that holds one at a time",
        (Clients(4, (60, 200), (10, 20), model="one"), Clients(4, (60, 200), (10, 20), model="two")),
        {"deferred_max": (3, MORE), "requests": (20, MORE)},
        LORA,
        also=("queue-bound",),
    ),
    # an engine that stops within the look
    Situation(
        "frozen-late",
        "frozen-engine",
        "9 clients; the core stops 20 s after the first of 60 s, and the page still answers",
        (Clients(6, (60, 200), (300, 500)), CHAT),
        {"running_max": (4, 16), "requests": (10, MORE)},
        seconds=60,
        stops_s=20,
    ),
    Situation(
        "frozen-late-2",
        "undecided",
        "9 clients; the core stops 46 s after the first of 60 s: too few to tell it from a long prefill",
        (Clients(6, (60, 200), (300, 500)), CHAT),
        {"running_max": (4, 16), "requests": (10, MORE)},
        seconds=60,
        stops_s=46,
    ),
    Situation(
        "frozen-api",
        "frozen-engine",
        "9 clients; the API server stops 20 s after the first of 45 s, and the page does not answer any more",
        (Clients(6, (60, 200), (300, 500)), CHAT),
        {"running_max": (4, 16), "requests": (5, MORE)},
        seconds=45,
        stops_s=20,
        api_stops=True,
    ),
    # prompts behind a queue
    Situation(
        "cache-off-queue",
        "cache-off",
        "24 clients, prompts of 2,000 to 2,200 tokens that begin with the same 1,800, answers of 20 to 40",
        (Clients(24, (2000, 2200), (20, 40), shared=1800),),
        {"queue_p95": (0.5, MORE), "waiting_max": (5, MORE), "requests": (40, MORE)},
        NO_CACHE,
        thresholds=QUICK,
        also=("queue-bound", "prefill-bound", "prefill-interference"),
        warm_up_s=15,
        seconds=40,
    ),
    Situation(
        "cache-off-queue-2",
        "cache-off",
        "60 clients, prompts of 2,500 to 2,800 tokens of which 2,300 are the same, answers of 30 to 60",
        (Clients(60, (2500, 2800), (30, 60), shared=2300),),
        {"queue_p95": (0.5, MORE), "waiting_max": (5, MORE), "requests": (40, MORE)},
        (*NO_CACHE, *MANY),
        thresholds=QUICK,
        also=("queue-bound", "prefill-bound", "prefill-interference"),
        warm_up_s=15,
        seconds=40,
    ),
    Situation(
        "cache-off-gaps",
        "cache-off",
        "60 clients, prompts of 1,000 to 1,100 tokens of which 900 are the same, answers of 30 to 60",
        (Clients(60, (1000, 1100), (30, 60), shared=900),),
        {"queue_p95": (0, 0.5), "inter_token_p95": (0.03, MORE), "requests": (40, MORE)},
        (*NO_CACHE, *MANY),
        thresholds={"inter_token_p95": 0.03},
        also=("prefill-bound", "prefill-interference"),
        warm_up_s=15,
        seconds=40,
    ),
    Situation(
        "queue-bound-4",
        "queue-bound",
        "40 clients on 4 sequences, 256 of 300 to 400 prompt tokens the same, answers of 300 to 400, no cache",
        (Clients(40, (300, 400), (300, 400), shared=256),),
        {"queue_p95": (5, MORE), "prefill_mean": (0, 0.5)},
        (*NO_CACHE, *FEW),
        warm_up_s=15,
        seconds=40,
    ),
    Situation(
        "unique-queue",
        "queue-bound",
        "30 clients, prompts of 1,500 to 2,500 tokens of which none comes twice, answers of 16 to 32",
        (Clients(30, (1500, 2500), (16, 32)),),
        {"queue_p95": (0.5, MORE), "hit_ratio": (0, 0.02), "requests": (40, MORE)},
        MANY,
        thresholds=QUICK,
        also=("unique-prompts", "prefill-bound", "prefill-interference"),
        warm_up_s=15,
        seconds=40,
    ),
    # within every limit
    Situation(
        "queue-kept",
        "queue-bound",
        "32 clients on 16 sequences, short prompts and answers: a queue at every look, and nobody waits long",
        (Clients(32, (40, 120), (20, 30)),),
        {"queue_p95": (0, 5), "ttft_p95": (0, 2.5), "inter_token_p95": (0, 0.1), "requests": (100, MORE)},
        warm_up_s=10,
        serious=False,
    ),
    # prompts in the steps of those who are answered
    Situation(
        "prefill-interference",
        "prefill-interference",
        "8 clients, prompts of 3,000 to 4,000 tokens of which 1,000 are the same, answers of 80 to 120",
        (Clients(8, (3000, 4000), (80, 120), shared=1000),),
        {"inter_token_p95": (0.03, MORE), "ttft_p95": (0, 2.5), "requests": (30, MORE)},
        thresholds={"inter_token_p95": 0.03},
        also=("unique-prompts",),
        seconds=40,
    ),
    Situation(
        "prefill-interference-2",
        "prefill-interference",
        "12 clients that pause, prompts of 1,500 to 2,500 tokens, 512 of them the same, answers of 24 to 40",
        (Clients(12, (1500, 2500), (24, 40), shared=512, pause_s=1.0),),
        {"inter_token_p95": (0.1, MORE), "requests": (30, MORE)},
        thresholds={"ttft_p95": 20.0, "queue_time_p95": 20.0},
        also=("unique-prompts", "queue-bound"),
        seconds=40,
    ),
    Situation(
        "small-steps",
        "small-steps",
        "2 clients, 18,000 to 24,000 prompt tokens of which none come twice, answers of 64 to 128, steps of 256",
        (Clients(2, (18000, 24000), (64, 128)),),
        {"ttft_p95": (0.5, MORE), "hit_ratio": (0, 0.02), "requests": (10, MORE)},
        SMALL_STEPS,
        thresholds={"ttft_p95": 0.5},
        also=("unique-prompts", "prefill-bound", "queue-bound"),
        seconds=60,
    ),
    Situation(
        "small-steps-2",
        "small-steps",
        "3 clients that pause, 18,000 to 24,000 prompt tokens of which none come twice, answers of 100 to 200, steps"
        " of 256",
        (Clients(3, (18000, 24000), (100, 200), pause_s=1.0),),
        {"ttft_p95": (0.5, MORE), "hit_ratio": (0, 0.02), "requests": (10, MORE)},
        SMALL_STEPS,
        thresholds={"ttft_p95": 0.5},
        also=("unique-prompts", "prefill-bound", "queue-bound"),
        seconds=60,
    ),
    Situation(
        "unique-prompts-3",
        "unique-prompts",
        "2 clients, 18,000 to 24,000 prompt tokens of which none come twice, answers of 64 to 128, steps of 2,048",
        (Clients(2, (18000, 24000), (64, 128)),),
        {"ttft_p95": (0.5, MORE), "hit_ratio": (0, 0.02), "requests": (10, MORE)},
        thresholds={"ttft_p95": 0.5},
        also=("prefill-bound", "queue-bound", "prefill-interference"),
        seconds=60,
    ),
)


# ---- the load


# ---- the recording


@dataclass(frozen=True, slots=True)
class Pages:
    """Texts of the two pages of each source, the looks between them with their seconds, and the log's lines of that
    time.

    silent_s: seconds since the last page that was answered."""

    before: str
    after: str
    seconds: float
    looks: Sequence[tuple[float, str]]
    silent_s: float = 0.0
    gateway: tuple[str, str] | None = None
    log: Sequence[bytes] = ()


async def record(situation: Situation, engine: Engine, again: Any, gate: Gate | None) -> Pages:
    """Makes the load and reads the pages. again: starts the engine once more at its place."""
    load = Load(gate.url if gate else engine.spec.address, gate.keys if gate else {}, situation.name)
    looks: list[tuple[float, str]] = []
    silent_s, stopped = 0.0, 0
    try:
        load.start(situation.clients)
        await asyncio.sleep(situation.warm_up_s)
        if situation.quiet:
            await load.stop()
            await asyncio.sleep(2)
        if situation.frozen:
            os.kill(core_of(engine), signal.SIGSTOP)
            await asyncio.sleep(3)
        began = time.time()
        before, gateway_before = await pages(engine, gate)
        if situation.restarted:
            await asyncio.to_thread(again)
            await asyncio.sleep(situation.warm_up_s)
        else:
            while (at_s := time.time() - began) < situation.seconds:
                if situation.stops_s is not None and at_s >= situation.stops_s and not stopped:
                    stopped = engine.process.pid if situation.api_stops else core_of(engine)
                    os.kill(stopped, signal.SIGSTOP)
                await asyncio.sleep(min(LOOK_S, situation.seconds - at_s))
                if situation.api_stops and stopped:
                    await asyncio.to_thread(no_answer, f"{engine.spec.address}/metrics")
                else:
                    looks.append((round(time.time() - began, 1), (await pages(engine, None))[0]))
        if situation.api_stops:
            (last_s, after), gateway_after = looks.pop(), ""
            silent_s = round(time.time() - began - last_s, 1)
        else:
            after, gateway_after = await pages(engine, gate)
        ended = time.time()
    finally:
        if situation.frozen or stopped:
            os.kill(stopped or core_of(engine), signal.SIGCONT)
        if not situation.quiet:
            await load.stop()
    log = [
        line
        for line in (gate.log.read_bytes().splitlines(keepends=True) if gate else [])
        if began <= (ended_at(parse_line(line)) or 0) <= ended
    ]
    return Pages(
        before, after, round(ended - began, 1), looks, silent_s, (gateway_before, gateway_after) if gate else None, log
    )


def no_answer(url: str) -> None:
    """Raises RuntimeError when a stopped API server answers all the same."""
    try:
        with urllib.request.urlopen(url, timeout=LOOK_S):
            raise RuntimeError(f"{url} answers although its process is stopped")
    except OSError:
        return


async def pages(engine: Engine, gate: Gate | None) -> tuple[str, str]:
    """Of the engine and, where there is one, of the gateway."""
    own = await asyncio.to_thread(get, f"{engine.spec.address}/metrics")
    return own, await asyncio.to_thread(get, f"{gate.metrics_url}/metrics") if gate else ""


# ---- what the pages show


def grown(metric: Metric, before: Exposition, after: Exposition, part: str = "", **labels: str) -> float:
    name = metric.name + part
    return (after.total(name, **labels) or 0.0) - (before.total(name, **labels) or 0.0)


def quantile(share: float, metric: Metric, before: Exposition, after: Exposition) -> float | None:
    """As PromQL reads it from the buckets, of what was added between two pages; None when that is nothing."""
    counts = {
        float(labels["le"]): grown(metric, before, after, "_bucket", le=labels["le"])
        for labels, _ in after.of(metric.name + "_bucket")
    }
    wanted, low, under = share * max(counts.values(), default=0.0), 0.0, 0.0
    for bound, count in sorted(counts.items()) if wanted else ():
        if count >= wanted:
            return low if bound == MORE else low + (bound - low) * (wanted - under) / (count - under)
        low, under = bound, count
    return None


def seen(found: Pages) -> dict[str, float]:
    """The telling figures, of an engine that was started again since then. Nothing that cannot be said is in it."""
    before, after = exposition_parser.parse(found.before), exposition_parser.parse(found.after)
    all_pages = (before, *(exposition_parser.parse(text) for _, text in found.looks), after)
    if grown(vllm.PROCESS_START_TIME, before, after):
        before = Exposition()

    def total(metric: Metric, part: str = "") -> float:
        return grown(metric, before, after, part)

    def mean(metric: Metric) -> float | None:
        return total(metric, "_sum") / count if (count := total(metric, "_count")) else None

    def most(metric: Metric) -> float:
        return max(each.total(metric.name) or 0.0 for each in all_pages)

    queried, drafted = total(vllm.PREFIX_CACHE_QUERIES), total(vllm.SPEC_DECODE_NUM_DRAFT_TOKENS)
    figures: dict[str, float | None] = {
        "requests": total(vllm.REQUEST_SUCCESS),
        "begun_less_ended": total(vllm.TIME_TO_FIRST_TOKEN, "_count") - total(vllm.E2E_REQUEST_LATENCY, "_count"),
        "rejected_by_engine": total(vllm.ADMISSION_REJECTIONS),
        "wrong": grown(vllm.HTTP_REQUESTS, before, after, handler="/v1/completions", status="4xx"),
        "prompt_tokens_mean": mean(vllm.REQUEST_PROMPT_TOKENS),
        "output_tokens_mean": mean(vllm.REQUEST_GENERATION_TOKENS),
        **{
            f"{name}_p95": quantile(0.95, metric, before, after)
            for name, metric in (
                ("ttft", vllm.TIME_TO_FIRST_TOKEN), ("queue", vllm.REQUEST_QUEUE_TIME),
                ("prefill", vllm.REQUEST_PREFILL_TIME),
                ("decode", vllm.REQUEST_DECODE_TIME), ("inter_token", vllm.INTER_TOKEN_LATENCY),
                ("e2e", vllm.E2E_REQUEST_LATENCY),
                ("prompt_tokens", vllm.REQUEST_PROMPT_TOKENS),
            )
        },
        "ttft_mean": mean(vllm.TIME_TO_FIRST_TOKEN),
        "queue_mean": mean(vllm.REQUEST_QUEUE_TIME), "prefill_mean": mean(vllm.REQUEST_PREFILL_TIME),
        "decode_mean": mean(vllm.REQUEST_DECODE_TIME),
        "running_max": most(vllm.NUM_REQUESTS_RUNNING), "waiting_max": most(vllm.NUM_REQUESTS_WAITING),
        "kv_max": most(vllm.KV_CACHE_USAGE),
        "deferred_max": max(each.total(vllm.NUM_REQUESTS_WAITING_BY_REASON.name, reason="deferred") or 0.0
            for each in all_pages),
        "preemptions": total(vllm.NUM_PREEMPTIONS),
        "hit_ratio": total(vllm.PREFIX_CACHE_HITS) / queried if queried else None,
        "prompt_tokens_per_s": total(vllm.PROMPT_TOKENS) / found.seconds,
        "output_tokens_per_s": total(vllm.GENERATION_TOKENS) / found.seconds,
        "accepted_ratio": total(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS) / drafted if drafted else None,
    }  # fmt: skip
    if found.log:
        outcomes = [
            f"{record.outcome}{f' {record.reason}' if record.outcome == 'rejected' else ''}"
            for record in map(parse_line, found.log)
        ]
        figures |= {f"log: {outcome}": float(outcomes.count(outcome)) for outcome in sorted(set(outcomes))}
    return {name: float(f"{value:.4g}") for name, value in figures.items() if value is not None}


def missing(tells: Mapping[str, Bounds], figures: Mapping[str, float]) -> list[str]:
    """What the pages do not show."""
    return [
        f"{name} is {figures.get(name)} and should be from {low:g} to {high:g}"
        for name, (low, high) in tells.items()
        if not low <= figures.get(name, -1.0) <= high
    ]


def write(situation: Situation, engine: Engine, found: Pages, figures: Mapping[str, float]) -> None:
    folder = FOLDER / situation.name
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"before.prom": found.before, "after.prom": found.after}
    if found.looks:
        texts["looks.prom"] = "".join(f"# look at {at_s:g} s\n{looked_at(text)}" for at_s, text in found.looks)
    if found.gateway:
        texts |= dict(zip(("gateway-before.prom", "gateway-after.prom"), found.gateway, strict=True))
    if found.log:
        texts["requests.jsonl"] = b"".join(found.log).decode()
    for name, text in texts.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    said = {
        "label": situation.label, "also": list(situation.also), "seconds": found.seconds, "load": situation.load,
        "flags": flags(engine), "thresholds": dict(situation.thresholds), "made_with": MADE_WITH, "seen": dict(figures),
        **({} if situation.serious else {"serious": False}), **({"silent_s": found.silent_s} if found.silent_s else {}),
    }  # fmt: skip
    (folder / "situation.yaml").write_text(yaml.safe_dump(said, sort_keys=False, width=140))


def looked_at(text: str) -> str:
    """The lines of a page that the doctor reads of a look between two others."""
    names = tuple(f"{name}{end}" for metric in series.LOOKED_AT for name in metric.names for end in ("{", " "))
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith(names))


def flags(engine: Engine) -> dict[str, str]:
    """What the engine was started with, but for where it listens and where files lie; of a flag that was given twice
    the last."""
    given: dict[str, str] = {}
    for word in engine.spec.argv[3:]:
        if word.startswith("--"):
            name = word
            given[name] = ""
        else:
            given[name] += (" " if given[name] else "") + re.sub(r"/\S*/", "", word)
    return {name: value for name, value in given.items() if name not in ("--host", "--port")}


# ---- by hand


@contextlib.contextmanager
def gateway(situation: Situation, engine: Engine) -> Iterator[Gate | None]:
    if situation.policy is None:
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="situation-") as folder,
        running(
            "gate", Path(folder), situation.policy, {"engine": engine.spec.address}, (free_port(), free_port())
        ) as gate,
    ):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                get(f"{gate.url}/-/healthy")
                break
            time.sleep(0.2)
        yield gate


def adapter(folder: Path) -> None:
    """A LoRA adapter for the tiny model that changes nothing, in the format of PEFT."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(told))
    size = 8 * 64 * 4
    tensors: dict[str, Any] = {}
    for layer in range(2):
        for part, shape in (("A", [8, 64]), ("B", [64, 8])):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
            tensors[name] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [size * len(tensors), size * (len(tensors) + 1)],
            }
    head = json.dumps(tensors).encode()
    (folder / "adapter_model.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + bytes(size * len(tensors))
    )


class Place:
    """Where one engine runs at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._core = folder, min(os.sched_getaffinity(0))
        self._flags: tuple[str, ...] | None = None
        self.engine: Engine | None = None

    def with_flags(self, flags: tuple[str, ...]) -> Engine:
        if self.engine is None or self._flags != flags:
            self.start(flags, free_port())
        assert self.engine is not None
        return self.engine

    def again(self) -> None:
        """Killed, and started at the same port."""
        assert self.engine is not None
        assert self._flags is not None
        port = int(self.engine.spec.address.rpartition(":")[2])
        self.engine.end(signal.SIGKILL)
        self.start(self._flags, port)

    def start(self, flags: tuple[str, ...], port: int) -> None:
        self.end()
        at = self._folder / "adapters"
        for name in ("one", "two") if any(ADAPTERS in flag for flag in flags) else ():
            adapter(at / name)
        self.engine = started(
            self._folder, engine_parts(), port, self._core, *(flag.replace(ADAPTERS, str(at)) for flag in flags)
        )
        self._flags = flags
        self.engine.up()

    def end(self) -> None:
        if self.engine is not None:
            self.engine.end()
            self.engine = None


def main(names: Sequence[str]) -> int:
    if unknown := set(names) - {situation.name for situation in SITUATIONS}:
        sys.stderr.write(f"there is no situation {', '.join(sorted(unknown))}\n")
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="situations-") as folder:
        place = Place(Path(folder))
        cores = os.sched_getaffinity(0)
        try:
            for situation in SITUATIONS:
                if names and situation.name not in names:
                    continue
                engine = place.with_flags(situation.flags)
                os.sched_setaffinity(0, {max(cores)})
                with gateway(situation, engine) as gate:
                    found = asyncio.run(record(situation, engine, place.again, gate))
                os.sched_setaffinity(0, cores)
                figures = seen(found)
                lacks = missing(situation.tells, figures) + ["the log is too long"] * (len(found.log) > LOG_LINES)
                sys.stdout.write(
                    f"{situation.name}: {figures}\n" + "".join(f"  NOT WRITTEN: {each}\n" for each in lacks)
                )
                sys.stdout.flush()
                wrong += bool(lacks)
                if not lacks:
                    write(situation, engine, found, figures)
                if situation.spoils:
                    place.end()
        finally:
            place.end()
    return 1 if wrong else 0


if __name__ == "__main__":
    supervisor._die_with_parent()
    sys.exit(main(sys.argv[1:]))

"""Memory and options of a running engine, from metrics and start-up log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from exporters.catalogue import exposition_parser, vllm
from exporters.catalogue.exposition_parser import Exposition
from exporters.engine.client import EngineClient, ModelCard
from exporters.net.http_client import HttpClientConfig, describe_error
from stack.bench.measurements import Startup, startup
from stack.bench.result import without_login

READ_S = 10.0
_MODELS = "/v1/models"
BLOCKS, TOKENS, BY_BLOCKS = "KV cache blocks", "KV cache tokens", "page: num_gpu_blocks x block_size"


class BadLive(ValueError):
    """An engine that nothing can be compared with; one sentence with the way out."""


@dataclass(frozen=True, slots=True)
class Served:
    """Answers of an engine besides /metrics. names: those that it answers to, and where its model came from;
    max_model_len: of its longest request."""

    place: str = "the page"
    version: str | None = None
    names: tuple[str, ...] = ()
    max_model_len: int | None = None


NOT_ASKED = Served()  # an engine of which only the page is known


async def read(url: str, key: str | None = None, way: HttpClientConfig | None = None) -> tuple[str, Served]:
    """An engine's page and what it serves. Raises BadLive, and BadConfig for a file of `way`."""
    base = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    if not re.match(r"https?://[\w\[]", base):
        named = "what stands there" if "@" in base else repr(base)  # a login is shown nowhere
        raise BadLive(f"{named} is no address of an engine; write it like http://127.0.0.1:8000")
    if (shown := without_login(base)) != base:
        raise BadLive(
            f"the address {shown} came with a login, which no request is sent with; give a key with --api-key-file"
        )
    try:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(session, base, READ_S, way, key)
            text, version = await client.scrape()
            listed = await _models(client)
    except aiohttp.ClientResponseError as error:
        raise BadLive(f"{base}/metrics answers {error.status}; give the address of vLLM itself") from error
    except exposition_parser.BadExposition as error:
        raise BadLive(str(error)) from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = describe_error(error) or error or type(error).__name__
        raise BadLive(
            f"no engine answers at {base}/metrics ({reason}); is vLLM up, and is that its address?"
        ) from error
    models = [model for model in listed if model.parent is None]  # the others are adapters
    names = dict.fromkeys(name for model in models for name in (model.root, model.id) if name)
    return text, Served(base, version, tuple(names), next((model.max_model_len for model in models), None))


async def _models(client: EngineClient) -> list[ModelCard]:
    """The models that it lists; none where it lists none. Raises BadLive where it wants a key."""
    try:
        return await client.models()
    except exposition_parser.BadExposition:
        return []
    except aiohttp.ClientResponseError as error:
        if error.status in (401, 403):
            raise BadLive(f"{client.url}{_MODELS} answers {error.status}; give the key with --api-key-file") from error
        return []


@dataclass(frozen=True, slots=True)
class EngineReport:
    """All that page and log say of one engine core; None where they do not. sources: by field, where it stands."""

    model: str
    engine: str
    labels: Mapping[str, str]
    log: Startup
    said: Mapping[str, str]  # configuration in the log
    found: Exposition

    def label(self, name: str) -> float | None:
        """A number above 0; nothing that is read here can be less."""
        value = _number(self.labels.get(name))
        return value if value is not None and value > 0 else None

    def first(self, *candidates: tuple[float | None, str]) -> tuple[float | None, str]:
        """The first that is known, and where it comes from."""
        return next(((value, source) for value, source in candidates if value is not None), (None, ""))

    @property
    def override(self) -> bool:
        """Return whether blocks were counted by hand, so that memory says nothing about them."""
        return self.label("num_gpu_blocks_override") is not None

    @property
    def by_hand(self) -> bool:
        """Return whether the cache's bytes were set by hand: /metrics reports them only then."""
        return self.kv_bytes[1].startswith("page")

    @property
    def kv_bytes(self) -> tuple[float | None, str]:
        if self.override:
            return None, ""
        return self.first(
            (self.label("kv_cache_memory_bytes"), "page: kv_cache_memory_bytes"),
            (self.label("cpu_kvcache_space_bytes"), "page: cpu_kvcache_space_bytes"),
            (self.log.kv, "start-up log, to 0.01 GiB"),
        )

    @property
    def blocks(self) -> tuple[float | None, str]:
        return self.label("num_gpu_blocks"), "page: num_gpu_blocks"

    def tokens(self, alike: bool) -> tuple[float | None, str]:
        """alike: all layers keep every token, so that blocks can be counted in tokens."""
        blocks, size = self.label("num_gpu_blocks"), self.label("block_size")
        return self.first(
            (self.label("kv_cache_size_tokens"), "page: kv_cache_size_tokens"),
            (self.log.kv_tokens, "start-up log"),
            (blocks * size if alike and blocks and size else None, BY_BLOCKS),
        )

    @property
    def concurrency(self) -> tuple[float | None, str]:
        return self.first(
            (self.label("kv_cache_max_concurrency"), "page: kv_cache_max_concurrency"),
            (self.log.concurrency, "start-up log, to 0.01"),
        )

    @property
    def longest(self) -> int | None:
        """The longest request, as far as page or log say it: tokens and concurrency are each other times it, rounded
        down."""
        tokens, at_once = self.label("kv_cache_size_tokens"), self.label("kv_cache_max_concurrency")
        if tokens and at_once and at_once >= 1:
            return math.ceil(tokens / at_once - 1e-6)
        return self.log.longest_tokens or whole_number(self.said.get("max_seq_len"))

    def gauge(self, metric: str) -> float | None:
        """Return a gauge of this engine core."""
        values = [
            value
            for labels, value in self.found.of(metric)
            if labels.get("engine", "") == self.engine and math.isfinite(value) and value >= 0
        ]
        return sum(values) if values else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def whole_number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def yes_or_no(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")


# "Initializing a V1 LLM engine (v0.32.0) with config: model='...', dtype=torch.bfloat16, max_seq_len=32768,
# tensor_parallel_size=1, ..."
_STARTS = re.compile(r"Initializing a V1 LLM engine")
_OPTION = re.compile(
    r"\b(model|dtype|max_seq_len|tensor_parallel_size|pipeline_parallel_size|kv_cache_dtype|device_config)=(?:torch\.)?'?([^,'\s]+)"
)
_ASYNC = re.compile(r"'async_scheduling': (True|False)")
_BATCHED = re.compile(r"max_num_batched_tokens[=:' ]+(\d+)")


def _start(log: str) -> tuple[Startup, dict[str, str]]:
    """Return memory and configuration from the last start in a log."""
    at = [found.start() for found in _STARTS.finditer(log)]
    last = log[at[-1] :] if at else log
    said = dict(reversed(_OPTION.findall(last.partition("\n")[0]))) if at else {}
    before = log[at[-2] if len(at) > 1 else 0 :]  # options and batch are logged before the engine
    if batched := _BATCHED.findall(before):
        said["max_num_batched_tokens"] = batched[-1]
    # the CPU build never does
    if chosen := ["False"] if said.get("device_config") == "cpu" else _ASYNC.findall(before):
        said["async_scheduling"] = chosen[-1]
    return startup(last), said


def read_report(text: str, log: str | None, place: str) -> tuple[EngineReport, tuple[str, ...]]:
    """The engine core that is used most, and what is to be said of the others. Raises BadLive."""
    try:
        found = exposition_parser.parse(text)
    except exposition_parser.BadExposition as error:
        raise BadLive(f"{place}: {error}") from error
    if not any(name.startswith("vllm:") for name in found.families()):
        raise BadLive(
            f"{place} shows no series of vLLM; give the address of vLLM itself, not of a gateway or an exporter"
        )
    memory, said = _start(log or "")
    cores = {labels.get("engine", ""): labels for labels, _ in found.of(vllm.CACHE_CONFIG_INFO.name)}
    if not cores and memory == Startup():
        raise BadLive(
            f"{place} does not show {vllm.CACHE_CONFIG_INFO.name} (the Rust frontend does not, nor does an engine that"
            " is still starting): give its start-up log, or ask again when it is up"
        )
    models = {
        labels.get("engine", ""): labels.get("model_name", "") for labels, _ in found.of(vllm.NUM_REQUESTS_RUNNING.name)
    }
    every = [
        EngineReport(models.get(core, ""), core, labels, memory, said, found) for core, labels in cores.items()
    ] or [EngineReport(next(iter(models.values()), ""), next(iter(models), ""), {}, memory, said, found)]
    fullest = max(every, key=lambda core: core.gauge(usage_series(found)) or 0.0)
    notes = (
        (
            f"{len(every)} engine cores (data-parallel ranks) answer there; the figures are of the one in use most,"
            f" {fullest.engine}"
        ),
    )
    return fullest, notes if len(every) > 1 else ()


def usage_series(found: Exposition) -> str:
    """Under which name this page shows how much of the cache is in use."""
    return next((name for name in vllm.KV_CACHE_USAGE.names if name in found), vllm.KV_CACHE_USAGE.name)

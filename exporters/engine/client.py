"""Client of an inference engine: /metrics, /version, /v1/models, /server_info and /health.

Invariant: an engine is untrusted. No response is read beyond its limit, and a version enters events and logs only if
it is short and printable."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from exporters.catalogue.exposition_parser import BadExposition
from exporters.engine.liveness import Endpoint
from exporters.net.bounded_read import ResponseTooLarge, read_bounded
from exporters.net.http_client import HttpClientConfig, describe_error, request_options

TIMEOUT_S = 10.0
MAX_VERSION_BYTES = 64 << 10
MAX_VERSION_LENGTH = 64  # characters


class ModelCard(msgspec.Struct):
    """Model in the response of /v1/models. parent: None, or the base model of an adapter."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_model_len, int):
            self.max_model_len = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


@dataclass(frozen=True, slots=True)
class EngineClient:
    """Client of one engine.

    http_config: TLS and auth for every request; key: for /v1 only, as in vLLM. options: further arguments of aiohttp
    requests. Every method raises aiohttp.ClientError (ClientResponseError for any status but 200, ResponseTooLarge
    for too long a response), TimeoutError, and BadConfig for http_config."""

    session: aiohttp.ClientSession
    url: str
    timeout_s: float = TIMEOUT_S
    http_config: HttpClientConfig | None = None
    key: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    async def metrics(self, max_bytes: int | None = None) -> bytes:
        return await self._read("/metrics", max_bytes)

    async def metrics_page(self, max_bytes: int | None = None) -> tuple[bytes, str]:
        """Return the /metrics text and its content type."""
        return await self._read_typed("/metrics", max_bytes)

    async def version(self) -> str | None:
        """Return the engine's release; None if not reported."""
        try:
            body = msgspec.json.decode(await self._read("/version", MAX_VERSION_BYTES))
        except (
            aiohttp.ClientError,
            TimeoutError,
            ValueError,
        ):  # ValueError includes BadExposition and msgspec's errors
            return None
        version = body.get("version") if isinstance(body, dict) else None
        sound = isinstance(version, str) and len(version) <= MAX_VERSION_LENGTH and version.isprintable()
        return version if sound else None

    async def scrape(self) -> tuple[str, str | None]:
        """Return the /metrics text and the version. Raises BadExposition if the text is too long."""
        try:
            body = await self.metrics()
        except ResponseTooLarge as error:
            raise BadExposition(f"{self.url}/metrics: {error}; too long for an engine's /metrics") from None
        return body.decode("utf-8", "replace"), await self.version()

    async def models(self) -> list[ModelCard]:
        """Return the served models. Raises BadExposition if the response is not a list of models."""
        login: dict[str, Any] = {"headers": {"Authorization": f"Bearer {self.key}"}} if self.key else {}
        return parse_models(await self._read("/v1/models", **login))

    async def served_names(self) -> Mapping[str, str] | None:
        """Return the engine's served model names, as `served_names`; None if not reported."""
        try:
            return served_names(await self.models())
        except (aiohttp.ClientError, TimeoutError, BadExposition):
            return None

    async def server_info(self) -> Mapping[str, Any]:
        """Return the configuration that vLLM exposes in development mode; empty otherwise."""
        try:
            body = msgspec.json.decode(await self._read("/server_info", params={"config_format": "json"}))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}

    async def paused(self) -> bool:
        """Return whether the scheduler is paused, which vLLM reports in development mode only, the mode that can
        pause it."""
        return bool(await self._flag(self._request("/is_paused"), "is_paused"))

    async def scaling(self) -> bool | None:
        """Return whether elastic expert parallelism scales; None for an engine without that status."""
        return await self._flag(self._request("/is_scaling_elastic_ep", "POST"), "is_scaling_elastic_ep")

    async def endpoint(self, error: Exception) -> Endpoint:
        """Return what a failed scrape shows. An elastic engine that scales refuses all but its health and its
        status."""
        if isinstance(error, TimeoutError):
            return Endpoint.SILENT
        if is_refused(error):
            return Endpoint.REFUSED
        if isinstance(error, aiohttp.ClientResponseError) and error.status == 503:
            scaling = await self.scaling()
            if scaling is not None:
                return Endpoint.SCALING if scaling else Endpoint.RETIRED
        return Endpoint.UNREAD

    async def _flag(self, request: aiohttp.client._RequestContextManager, name: str) -> bool | None:
        """Return a flag of a JSON response; None if not reported."""
        try:
            async with request as response:
                body = msgspec.json.decode(await read_bounded(response, MAX_VERSION_BYTES))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        value = body.get(name) if isinstance(body, dict) and response.status == 200 else None
        return value if isinstance(value, bool) else None

    async def post(
        self, path: str, body: object, request_id: str | None = None, max_bytes: int | None = None
    ) -> tuple[int, bytes]:
        """Send a JSON body with the key, and return status and response, whatever the status."""
        headers = {"Content-Type": "application/json"}
        headers |= {"X-Request-Id": request_id} if request_id else {}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        options = {**self.options, **request_options(self.http_config)}
        headers = {**options.pop("headers", {}), **headers}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        data = msgspec.json.encode(body)
        async with self.session.post(
            self.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False, **options
        ) as response:
            return response.status, await read_bounded(response, max_bytes)

    async def health(self) -> int:
        """Return the status of /health."""
        async with self._request("/health") as response:
            return response.status

    def _request(self, path: str, method: str = "GET", **more: Any) -> aiohttp.client._RequestContextManager:
        options = {**self.options, **request_options(self.http_config), **more}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        return self.session.request(method, self.url + path, timeout=timeout, **options)

    async def _read(self, path: str, max_bytes: int | None = None, **more: Any) -> bytes:
        return (await self._read_typed(path, max_bytes, **more))[0]

    async def _read_typed(self, path: str, max_bytes: int | None = None, **more: Any) -> tuple[bytes, str]:
        async with self._request(path, **more) as response:
            response.raise_for_status()
            if response.status != 200:
                reason = response.reason or ""
                raise aiohttp.ClientResponseError(response.request_info, (), status=response.status, message=reason)
            return await read_bounded(response, max_bytes), response.headers.get("Content-Type", "text/plain")


def is_refused(error: BaseException) -> bool:
    """Return whether nobody listens there: the process is gone, however busy the machine is."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED


def parse_models(body: bytes) -> list[ModelCard]:
    """Parse a response of /v1/models. Raises BadExposition."""
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadExposition("not a list of models") from None


def served_names(models: Sequence[ModelCard]) -> Mapping[str, str]:
    """Map each served name or adapter to the model_name of the engine's series, which is the first name served."""
    first: dict[str | None, str] = {}
    for model in models:
        if model.parent is None:
            first.setdefault(model.root, model.id)
    names = {model.id: first[model.root] for model in models if model.parent is None}
    return names | {model.id: names.get(model.parent, model.parent) for model in models if model.parent is not None}


async def scrape_engine(
    url: str, timeout_s: float = TIMEOUT_S, http_config: HttpClientConfig | None = None
) -> tuple[str, str | None]:
    """Return /metrics text and version of the engine at a user-supplied URL, with or without /metrics.

    Raises OSError with a sentence."""
    base = url.rstrip("/").removesuffix("/metrics")
    try:
        async with aiohttp.ClientSession() as session:
            return await EngineClient(session, base, timeout_s, http_config).scrape()
    except aiohttp.ClientResponseError as error:
        hint = (
            "credentials required: --http-config" if error.status in (401, 403) else "is this the URL of a vLLM server?"
        )
        raise OSError(f"{base}/metrics returned {error.status} {error.message}; {hint}") from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        cause = describe_error(error) or error or "timed out"
        hint = (
            "set the CA file: --http-config"
            if isinstance(error, aiohttp.ClientSSLError)
            else "check that the engine runs and the URL is correct"
        )
        raise OSError(f"{base}/metrics does not answer ({cause}); {hint}") from error

"""Client of an Alertmanager: current alerts.

Invariant: responses are read up to a limit; labels and annotations are untrusted."""

from __future__ import annotations

import re

import aiohttp
import msgspec

from exporters.net.bounded_read import read_bounded
from exporters.net.http_client import HttpClientConfig, describe_error, request_options

TIMEOUT_S = 8.0


class _Status(msgspec.Struct):
    state: str = ""


class Firing(msgspec.Struct, frozen=True, rename="camel"):
    """One alert, as Alertmanager writes it: status is a word in a webhook, an object in the API and from amtool."""

    labels: dict[str, str]
    annotations: dict[str, str] = {}
    starts_at: str = ""
    status: str | _Status = ""

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "")

    @property
    def is_over(self) -> bool:
        return self.status == "resolved"

    @property
    def is_muted(self) -> bool:
        """True if muted by a silence or by an inhibiting alert."""
        return isinstance(self.status, _Status) and self.status.state == "suppressed"


class _Webhook(msgspec.Struct):
    alerts: list[Firing]


def parse_alerts(body: bytes, where: str) -> list[Firing]:
    """Parse a webhook body, a response of Alertmanager's API, or amtool's JSON; resolved alerts are omitted.

    Raises ValueError that names the origin of the text."""
    try:
        read = msgspec.json.decode(body, type=list[Firing] | _Webhook)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"{where}: not alerts in Alertmanager's format ({error}); give the body of a webhook, or `amtool alert -o"
            " json`"
        ) from None
    return [alert for alert in (read.alerts if isinstance(read, _Webhook) else read) if not alert.is_over]


async def firing_alerts(
    url: str, http_config: HttpClientConfig | None = None, name: str = "", timeout_s: float = TIMEOUT_S
) -> list[Firing]:
    """Return the current alerts of an Alertmanager, all or those of one name.

    Raises ValueError for an invalid URL or a response without alerts, OSError if Alertmanager does not respond, and
    BadConfig for http_config."""
    if not re.fullmatch(r"https?://[^\s@]+", url):
        raise ValueError("--alertmanager is no address; write it like http://127.0.0.1:9093")
    params = {"active": "true"} | ({"filter": f'alertname="{name}"'} if name else {})
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(
                f"{url.rstrip('/')}/api/v2/alerts", params=params, allow_redirects=False, **request_options(http_config)
            ) as response,
        ):
            body = await read_bounded(response)
    except (aiohttp.ClientError, TimeoutError) as error:
        cause = describe_error(error) or str(error) or type(error).__name__
        raise OSError(f"Alertmanager at {url} does not answer ({cause}); is it up, and --alertmanager right?") from None
    if response.status in (401, 403):
        raise OSError(f"Alertmanager at {url} answers HTTP {response.status}: it wants a login, by --http-config")
    if response.status != 200:
        raise OSError(f"{url} answers HTTP {response.status} and not like an Alertmanager; is this its address?")
    return parse_alerts(body, url)

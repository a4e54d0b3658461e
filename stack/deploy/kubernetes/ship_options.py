"""Options of `vllm-watch kubernetes export` for the data set of requests, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from exporters.dataset.objects import S3Access
from stack.option import Opt

VOLUME = "volume"  # dataset: a folder of the gateway's volume
CREDENTIALS = "/etc/vllm-watch/ship/credentials"  # key `credentials` of the secret, in the container


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipOptions:
    """Data set that a shipper in the gateway's pod writes. dataset: s3://bucket/prefix or VOLUME; empty for no shipper.
    secret: holds credentials of the store.

    Raises ValueError."""

    dataset: Annotated[
        str, Opt(name="--ship", metavar="LOCATION", help="Keep requests as a data set: s3://bucket/prefix, or volume.")
    ] = ""
    endpoint: Annotated[
        str, Opt(name="--ship-endpoint", metavar="URL", help="URL of that S3-compatible store.  [default: AWS]")
    ] = ""
    region: Annotated[str, Opt(name="--ship-region", metavar="NAME", help="Region of that store.")] = S3Access().region
    secret: Annotated[
        str, Opt(name="--ship-secret", metavar="NAME", help="Secret with credentials, as ~/.aws/credentials.")
    ] = ""

    def __post_init__(self) -> None:
        if self.dataset not in ("", VOLUME) and not self.dataset.removeprefix("s3://").strip("/"):
            raise ValueError("--ship s3:// names no bucket; write it like s3://bucket/prefix")
        if self.dataset not in ("", VOLUME) and not self.dataset.startswith("s3://"):
            raise ValueError(f"--ship {self.dataset!r} is no location; write s3://bucket/prefix, or {VOLUME}")
        if not self.in_store and (self.endpoint or self.secret or self.region != S3Access().region):
            raise ValueError("--ship-endpoint, --ship-region and --ship-secret are for a store; add --ship s3://BUCKET")
        try:
            self.access()
        except ValueError as error:
            raise ValueError(f"--ship-{error}") from error

    @property
    def in_store(self) -> bool:
        return self.dataset.startswith("s3://")

    @property
    def port(self) -> int:
        """Return the port of the store."""
        return urlsplit(self.endpoint).port or 443

    def access(self) -> S3Access:
        """Return the access to the store, with paths in the pod. Raises ValueError."""
        return S3Access(
            endpoint=self.endpoint or None, region=self.region, credentials_file=CREDENTIALS if self.secret else None
        )

"""Objects of an S3-compatible store. Only this file imports obstore.

Requests are signed (SigV4), retried, and verified against the CAs of the system or `ca_file`. Credentials are read
again when their file changes and when the store refuses them."""

from __future__ import annotations

import configparser
import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from html import unescape
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import S3Store

from exporters.config import BadConfig
from exporters.dataset.objects import S3Access, StoreError, StoreRefusesAccess, store_error
from exporters.text import format_duration

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

T = TypeVar("T")
_INSTANCE_ROLE = "169.254.169.254"  # asked for credentials if there are no others

log = logging.getLogger("vllm_watch.ship")


class S3ObjectStore:
    """Objects under a prefix of a bucket."""

    def __init__(self, bucket: str, prefix: str, options: S3Access) -> None:
        self._where = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._prefix, self._options = bucket, prefix, options
        self._client: ClientConfig = {
            "timeout": timedelta(seconds=options.timeout_s),
            "allow_http": bool(options.endpoint and options.endpoint.startswith("http://")),
        }
        if options.ca_file:
            self._client["root_certificate"] = Path(options.ca_file).read_bytes()
        self._file = Path(options.credentials_file) if options.credentials_file else None
        self._file_id = _identity(self._file)
        self._credentials: S3Config = _credentials(self._file, options.profile) if self._file else {}
        self._store = self._connect()

    @property
    def name(self) -> str:
        return self._where

    def get(self, key: str) -> tuple[bytes, str] | None:
        def read(store: S3Store) -> tuple[bytes, str]:
            found = obstore.get(store, key)
            return bytes(found.bytes()), found.meta["e_tag"] or ""

        return self._send(key, read, may_be_absent=True)

    def put(self, key: str, data: bytes) -> None:
        self._send(key, lambda store: obstore.put(store, key, data, use_multipart=False))

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        mode: Any = "create" if version is None else {"e_tag": version}
        stored = self._send(key, lambda store: obstore.put(store, key, data, mode=mode, use_multipart=False))
        return (stored and stored["e_tag"]) or ""

    def delete(self, key: str) -> None:
        self._send(key, lambda store: obstore.delete(store, key), may_be_absent=True)

    def keys(self, prefix: str) -> Iterator[str]:
        def read(store: S3Store) -> list[str]:
            return sorted(entry["path"] for page in obstore.list(store, prefix.rstrip("/")) for entry in page)

        yield from self._send(prefix, read) or ()

    def _connect(self) -> S3Store:
        config: S3Config = {
            "region": self._options.region,
            "virtual_hosted_style_request": self._options.virtual_hosted,
            "disable_bulk_delete": True,
            **self._credentials,
        }
        if self._options.endpoint:
            config["endpoint"] = self._options.endpoint
        return S3Store(
            self._bucket,
            prefix=self._prefix or None,
            config=config,
            client_options=self._client,
            retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=self._options.retry_s)},
        )

    def _send(self, key: str, request: Callable[[S3Store], T], may_be_absent: bool = False) -> T | None:
        """Send a request, again if the credentials are refused and their file has others. Raises StoreError.

        Return None for an absent object, if it may be absent."""
        if _identity(self._file) != self._file_id:
            self._renew()
        for last in (False, True):
            try:
                return request(self._store)
            except (BaseError, OSError, ValueError) as error:
                absent = isinstance(error, NotFoundError | FileNotFoundError) and "NoSuchBucket" not in str(error)
                if absent and may_be_absent:
                    return None
                failure = self._failure(key, error)
                if last or not isinstance(failure, StoreRefusesAccess) or not self._renew():
                    raise failure from error
        return None

    def _renew(self) -> bool:
        """Read the credentials again; return True if they are others. A file that cannot be used changes nothing."""
        if self._file is None:
            return False
        before, self._file_id = self._file_id, _identity(self._file)
        try:
            found = _credentials(self._file, self._options.profile)
        except BadConfig as error:
            if before != self._file_id:
                log.warning("%s; the former credentials stay in use", error)
            return False
        if found == self._credentials:
            return False
        self._credentials = found
        self._store = self._connect()
        return True

    def _failure(self, key: str, error: BaseException) -> StoreError:
        """Return an error by its cause. obstore's text has the store's answer, and then its own data structures."""
        head, _, debug = str(error).partition("\n\nDebug source:")
        for secret in (self._credentials.get("secret_access_key"), self._credentials.get("session_token")):
            head = head.replace(secret, "***") if secret else head
        where = f"{self._where}: {key}"
        answer = re.search(r"status code: (\d+)([^:]*):(.*)", head, re.DOTALL)
        if not answer or _INSTANCE_ROLE in head:
            said = head if isinstance(error, ValueError) or _INSTANCE_ROLE in head else head.rpartition(" - ")[2]
            inner = re.findall(r'"[^"]+"|InvalidCertificate\([\w\s(]+|TimedOut', debug.partition("Http(")[2])
            words = [re.sub(r'[\s("]+', " ", part).strip() for part in inner]
            return store_error(where, "", ": ".join((said, *words, self._region() if "redirect" in said else "")))
        status, reason, body = answer.groups()
        fields = {name: unescape(value) for name, value in re.findall(r"<(\w+)>([^<]+)</", body)}
        code = fields.get("Code") or f"HTTP {status}{reason}"
        message = fields.get("Message") or ("" if "Code" in fields else re.sub(r"<[^>]*>", " ", body))
        return store_error(where, code, f"{self._region() if status[0] == '3' else _details(fields)}{message}", status)

    def _region(self) -> str:
        """Ask for the region of the bucket, which obstore does not report with a redirect; empty if unknown."""
        url = urlsplit(self._options.endpoint or f"https://s3.{self._options.region}.amazonaws.com")
        connection = (HTTPSConnection if url.scheme == "https" else HTTPConnection)(url.netloc, timeout=5)
        try:
            connection.request("HEAD", f"/{self._bucket}")
            region = connection.getresponse().headers["x-amz-bucket-region"]
            return f"the store expects region {region}" if region else ""
        except (OSError, HTTPException):
            return ""
        finally:
            connection.close()


def _details(fields: Mapping[str, str]) -> str:
    """Return what an answer reports beside its message: the region of the bucket, or the store's time."""
    if region := fields.get("Region"):
        return f"the store expects region {region}: "
    with contextlib.suppress(KeyError, ValueError, TypeError):
        ahead = datetime.fromisoformat(fields["RequestTime"]) - datetime.fromisoformat(fields["ServerTime"])
        apart = format_duration(abs(int(ahead.total_seconds())))
        return f"this clock is {apart} {'behind' if ahead < timedelta() else 'ahead'}: "
    return ""


def _identity(path: Path | None) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced or written; None without a file."""
    try:
        found = path.stat() if path else None
    except OSError:
        return None
    return found and (found.st_ino, found.st_mtime_ns, found.st_size)


def _credentials(path: Path, profile: str) -> S3Config:
    """Read a credentials file of AWS. Raises BadConfig, which quotes nothing of it."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
        section = parser[profile]
        found: S3Config = {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
        }
        if token := section.get("aws_session_token"):
            found["session_token"] = token
        if not all(value and str(value).isascii() and str(value).isprintable() for value in found.values()):
            raise KeyError(profile)  # half written; the client ends at a control character
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
    except (configparser.Error, KeyError, UnicodeDecodeError):
        raise BadConfig(
            f"{path} needs the section [{profile}] with aws_access_key_id and aws_secret_access_key"
        ) from None
    return found

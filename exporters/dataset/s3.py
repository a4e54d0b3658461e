"""Objects of an S3-compatible store. Only this file imports obstore.

Requests are signed (SigV4), retried, and verified against the CAs of the system or `ca_file`."""

from __future__ import annotations

import configparser
import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import S3Store

from exporters.config import BadConfig
from exporters.dataset.objects import S3Access, StoreConflict, StoreError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config


class S3ObjectStore:
    """Objects under a prefix of a bucket."""

    def __init__(self, bucket: str, prefix: str, options: S3Access) -> None:
        self._where = f"s3://{bucket}/{prefix}".rstrip("/")
        config: S3Config = {
            "region": options.region,
            "virtual_hosted_style_request": options.virtual_hosted,
            "disable_bulk_delete": True,
        }
        if options.endpoint:
            config["endpoint"] = options.endpoint
        if options.credentials_file:
            config |= _credentials(Path(options.credentials_file), options.profile)
        client: ClientConfig = {
            "timeout": timedelta(seconds=options.timeout_s),
            "allow_http": bool(options.endpoint and options.endpoint.startswith("http://")),
        }
        if options.ca_file:
            client["root_certificate"] = Path(options.ca_file).read_bytes()
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=options.retry_s)},
        )

    @property
    def name(self) -> str:
        return self._where

    def get(self, key: str) -> tuple[bytes, str] | None:
        with self._named(key):
            try:
                found = obstore.get(self._store, key)
                return bytes(found.bytes()), found.meta["e_tag"] or ""
            except (NotFoundError, FileNotFoundError):
                return None

    def put(self, key: str, data: bytes) -> None:
        with self._named(key):
            obstore.put(self._store, key, data, use_multipart=False)

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        mode: Any = "create" if version is None else {"e_tag": version}
        with self._named(key):
            try:
                return obstore.put(self._store, key, data, mode=mode, use_multipart=False)["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError) as error:
                raise StoreConflict(f"{self.name}: {key} was changed by another writer") from error

    def delete(self, key: str) -> None:
        with self._named(key), contextlib.suppress(NotFoundError, FileNotFoundError):
            obstore.delete(self._store, key)

    def keys(self, prefix: str) -> Iterator[str]:
        with self._named(prefix):
            found = [entry["path"] for page in obstore.list(self._store, prefix.rstrip("/")) for entry in page]
        yield from sorted(found)

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.name}: {key}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the first line of an error, at most 300 characters; obstore's errors go on with debug output."""
    return str(error).partition("\n")[0][:300] or type(error).__name__


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
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
    except (configparser.Error, KeyError, UnicodeDecodeError):
        raise BadConfig(
            f"{path} needs the section [{profile}] with aws_access_key_id and aws_secret_access_key"
        ) from None
    return found

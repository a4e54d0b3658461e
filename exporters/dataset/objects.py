"""Object stores of a data set: a folder here, S3-compatible stores in s3.py.

Invariant: an object is stored as a whole or not at all, and durably when `put` returns. `put_if` replaces exactly the
version that the caller read, so that of two writers one is refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from exporters.dataset.layout import digest_of
from exporters.text import sync_folder, write_atomically


class S3Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Access to an S3-compatible store.

    endpoint: URL of a store other than AWS; http:// only on this machine. credentials_file: in the format of
    ~/.aws/credentials; without it AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a web identity token or the role of the
    instance apply. ca_file: CA of the store's certificate, if the system does not have it. timeout_s: of one request;
    retry_s: of all its attempts, after which the caller retries later."""

    endpoint: str | None = None
    region: str = "us-east-1"
    credentials_file: str | None = None
    profile: str = "default"
    ca_file: str | None = None
    virtual_hosted: bool = False
    timeout_s: float = 30.0
    retry_s: float = 10.0

    def __post_init__(self) -> None:
        if self.endpoint and not self.endpoint.startswith("https://"):
            host = self.endpoint.removeprefix("http://").partition("/")[0].rpartition(":")[0] or self.endpoint
            if not self.endpoint.startswith("http://") or host not in ("127.0.0.1", "localhost", "[::1]"):
                raise ValueError(f"endpoint {self.endpoint!r} must begin with https://, or be http:// on this machine")
        if min(self.timeout_s, self.retry_s) <= 0:
            raise ValueError("timeout_s and retry_s must be greater than 0")


class StoreError(OSError):
    """Store that failed or refused access. The message names the store, the key and the cause, without secrets."""


class StoreConflict(StoreError):
    """Object that another writer created or changed since it was read."""


class ObjectStore(Protocol):
    """Objects by key. All methods may raise StoreError; after one a write may have happened or not."""

    @property
    def name(self) -> str:
        """Return the location for messages, without credentials."""

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Return an object and its version; None if there is none."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object, whatever was there."""

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        """Store an object if it still has a version, or does not exist for None; return the new version.

        Raises StoreConflict. After a failed call that had stored it, the next one raises StoreConflict as well, and
        `get` returns the caller's own bytes."""

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is no error."""

    def keys(self, prefix: str) -> Iterator[str]:
        """Yield the keys under a prefix that ends with a slash, in order. A store may list a new one late."""


class FolderStore:
    """Objects as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        return str(self.folder)

    def path(self, key: str) -> Path:
        return self.folder / key

    def get(self, key: str) -> tuple[bytes, str] | None:
        with self._named(key):
            try:
                data = self.path(key).read_bytes()
            except FileNotFoundError:
                return None
            return data, digest_of(data)

    def put(self, key: str, data: bytes) -> None:
        with self._named(key):
            self._make(self.path(key).parent)
            write_atomically(self.path(key), data, sync=True)

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        with self._named(key), self._locked(key):
            found = self.get(key)
            if (found[1] if found else None) != version:
                raise StoreConflict(f"{self.name}: {key} was changed by another writer")
            self.put(key, data)
        return digest_of(data)

    def delete(self, key: str) -> None:
        with self._named(key):
            self.path(key).unlink(missing_ok=True)

    def keys(self, prefix: str) -> Iterator[str]:
        with self._named(prefix):
            found = [path for path in self.path(prefix).rglob("*") if path.is_file() and path.name[:1] != "."]
        yield from sorted(path.relative_to(self.folder).as_posix() for path in found)

    def _make(self, folder: Path) -> None:
        """Create a folder and its parents, durably."""
        if not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        path = self.path(key)
        self._make(path.parent)
        fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{self.name}: {key}: {error.strerror or error}") from error

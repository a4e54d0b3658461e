"""Object stores of a data set: a folder here, S3-compatible stores in s3.py.

Invariant: an object is stored as a whole or not at all, and durably when `put` returns. `put_if` replaces exactly the
version that the caller read, so that of two writers one is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from exporters.dataset.layout import digest_of
from exporters.text import printable, sync_folder, write_atomically


class S3Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Access to an S3-compatible store.

    endpoint: URL of a store other than AWS; http:// only on this machine. credentials_file: in the format of
    ~/.aws/credentials, read again when it changes; without it AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a web
    identity token or the role of the instance apply. ca_file: CA of the store's certificate, if the system does not
    have it. timeout_s: of one request; retry_s: of all its attempts, after which the caller retries later."""

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
    """Store that failed or refused a request. The message names the store, the key and the cause, without secrets."""


class StoreConflict(StoreError):
    """Conditional write that the store refused. The object may have changed, or another request was in progress."""


class StoreRefusesKey(StoreError):
    """Key that the store refuses for good: it is too long, or has characters that the store does not take."""


class StoreRefusesAccess(StoreError):
    """Credentials or permissions that the store does not accept."""


# Causes by the code of S3, the name of an errno, the client's words, or else the HTTP status; the first match applies.
_CAUSES: tuple[tuple[str, str, str, type[StoreError]], ...] = (
    (
        r"\w*(Region|Redirect|LocationConstraint)|(Auth|Sign)\w*: .*(expect|valid region)|Received redirect|30\d",
        "wrong region",
        "set `region` to that of the bucket",
        StoreError,
    ),
    (
        r"RequestTimeTooSkewed|RequestExpired|SignatureDoesNotMatch: Signature (expired|not yet)",
        "this machine's clock differs from the store's",
        "synchronize it (NTP)",
        StoreError,
    ),
    (
        r"\w*(Quota|StorageFull|InsufficientStorage)|507|ENOSPC|EDQUOT",
        "the store is full or its quota is used up",
        "free space or raise the quota",
        StoreError,
    ),
    (
        r".*169\.254\.169\.254",
        "no credentials",
        "set `credentials_file`, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        StoreRefusesAccess,
    ),
    (
        r"InvalidAccessKey|SignatureDoesNot|AuthorizationHeader|\w*(Unauthorized|Token|Credential|Security)|401",
        "the store refuses the credentials",
        "renew `credentials_file`",
        StoreRefusesAccess,
    ),
    (
        r"\w*(Denied|Forbidden)|AllAccessDisabled|AccountProblem|403|EACCES|EPERM|EROFS",
        "no permission",
        "allow to read and write there",
        StoreRefusesAccess,
    ),
    (r"NoSuchBucket|InvalidBucketName|HTTP 404", "no such bucket", "create it, or correct the location", StoreError),
    (
        r"KeyTooLong|\w*Invalid(Object|Resource)Name|InvalidURI|414|ENAMETOOLONG|EINVAL|EILSEQ|Could not parse path",
        "the store refuses the key",
        "shorten the prefix, or rename the model in the key",
        StoreRefusesKey,
    ),
    (
        r"ConditionalRequestConflict|PreconditionFailed|OperationAborted|NoSuchKey|409|412",
        "the store refuses a conditional write",
        "find out what else writes this object",
        StoreConflict,
    ),
    (
        r"NotImplemented|MethodNotAllowed|501|405|ENOTSUP|EOPNOTSUPP",
        "the store does not support this request",
        "use one with conditional writes (If-Match, If-None-Match)",
        StoreError,
    ),
    (
        r"SlowDown|\w*(Throttl|TooManyRequests|LimitExceeded|Busy|Unavailable|NotInitialized)|429|503|EBUSY|EAGAIN",
        "the store is busy",
        "wait, or raise its limits",
        StoreError,
    ),
    (
        r".*InvalidCertificate",
        "its TLS certificate is not valid here",
        "set `ca_file`, or correct `endpoint`",
        StoreError,
    ),
    (r".*dns error", "its name cannot be resolved", "correct `endpoint`, or check DNS", StoreError),
    (
        r".*(TimedOut|timed out)|RequestTimeout|408|504|ETIMEDOUT",
        "the store does not answer in time",
        "check the network, or raise `timeout_s`",
        StoreError,
    ),
    (
        r".*(connect error|HTTP error)|ECONN|EHOST|ENET|ENOTCONN",
        "the store cannot be reached",
        "check `endpoint`, the network and TLS",
        StoreError,
    ),
    (r"InternalError|5\d\d|EIO|ESTALE", "the store itself fails", "read its log", StoreError),
)


def store_error(location: str, code: str, message: str, status: str = "") -> StoreError:
    """Return the error of an object by its cause; an unknown one keeps code and message. status: of HTTP, if any."""
    reported = printable(": ".join(" ".join(part.split())[:300] for part in (code, message)).strip(": "))
    for sign in (reported, status):
        for pattern, cause, action, kind in _CAUSES:
            if re.match(pattern, sign):
                return kind(f"{location}: {cause} ({reported}); {action}")
    return StoreError(f"{location}: {reported}")


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

        Raises StoreConflict, also for no reason: what `get` returns decides. A call that seemed to fail may be applied
        later, as long as the version is the same."""

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
                raise StoreConflict(f"{self.name}: {key} was changed since it was read")
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
            code = errno.errorcode.get(error.errno or 0, "")
            raise store_error(f"{self.name}: {key}", code, error.strerror or str(error)) from error

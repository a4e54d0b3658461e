"""Health check of a listener in its own container. python -m vllm_watch.module stack.deploy.probe https://localhost:8010/metrics

For compose's health checks under TLS. It believes the authority of compose.secure.yml and no other. An answer that asks
for a login (401) is an
answer: the probe holds no password, so that none can be read off it. Standard library only, because it starts every ten
seconds."""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

AUTHORITY = Path("/etc/vllm-watch/tls/ca.crt")
WITHIN_S = 4.0


def alive(url: str, authority: Path = AUTHORITY) -> bool:
    """Return whether it answered without an error of its own. Raises OSError, which includes ssl's errors, when there
    is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=WITHIN_S, context=ssl.create_default_context(cafile=authority)):  # noqa: S310  ours
            return True
    except urllib.error.HTTPError as error:
        return error.code == 401


if __name__ == "__main__":
    try:
        sys.exit(0 if alive(sys.argv[1]) else "the listener answers with an error")
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")

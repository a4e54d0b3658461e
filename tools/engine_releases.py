"""Releases of vLLM on PyPI that are newer than the newest one in the catalogue."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

from exporters.catalogue.metric import key
from stack.reference.upgrades import releases

_WITHIN_S = 20.0
_RELEASE = re.compile(r"\d+(\.\d+)+")


def published() -> list[str]:
    """Return the releases of vLLM on the package index of pip; none where it does not answer."""
    command = (sys.executable, "-m", "pip", "--no-input", "--retries", "0", "index", "versions", "vllm")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    return read(found)


def read(text: str) -> list[str]:
    """Return the releases in the output of `pip index versions`, without pre-releases."""
    listed = next((line for line in text.splitlines() if line.startswith("Available versions:")), "")
    words = listed.partition(":")[2].replace(" ", "").split(",")
    return [word for word in words if _RELEASE.fullmatch(word)]


def newer(found: Sequence[str], catalogued: str) -> list[str]:
    """Return the minor releases after the catalogued one, the oldest first."""
    minors = {".".join(release.split(".")[:2]) for release in found}
    return sorted((minor for minor in minors if key(minor) > key(catalogued)), key=key)


def report() -> str:
    """Return a sentence on the releases that are not catalogued; empty if there are none, or nothing is known."""
    catalogued = releases()[0]
    missing = newer(published(), catalogued)
    if not missing:
        return ""
    return (
        f"vLLM {', '.join(missing)} is on PyPI, and the catalogue ends with {catalogued}: compare them with"
        " `vllm-watch metrics drift --installed` (docs/internals/extending.md)"
    )

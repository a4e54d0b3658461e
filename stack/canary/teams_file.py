"""teams.yaml of a canary: its policy, and its text with another share.

Invariant: of the text only the value of canary.share changes, so comments stay and the change of somebody else is never
overwritten by an older copy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exporters.config import with_scalar
from exporters.text import write_atomically
from stack.config import BadConfig
from stack.gateway.policy import Canary, Policy
from stack.gateway.teams import load_policy


@dataclass(frozen=True, slots=True)
class TeamsFile:
    """A checked file. mark: changes with the upstreams, and with the canary's policy but for its share."""

    path: Path
    policy: Policy
    canary: Canary

    @property
    def mark(self) -> str:
        content = msgspec.structs.replace(self.canary, share=0.0), self.policy.upstreams
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]

    @property
    def engines(self) -> dict[str, str]:
        """Return the addresses of the canary's engines by their names."""
        return {
            name: upstream.url
            for name, upstream in self.policy.upstreams.items()
            if upstream.variant == self.canary.variant and upstream.kind == "engine"
        }


def read_teams(path: Path) -> TeamsFile:
    """Read and check teams.yaml. Raises BadConfig."""
    policy = load_policy(path)
    if policy.canary is None:
        raise BadConfig(f"{path}: canary is missing; add `canary: {{variant: NAME, share: 0}}` (docs/guides/canary.md)")
    return TeamsFile(path, policy, policy.canary)


def write_share(file: TeamsFile, share: float) -> None:
    """Write the file with another share, as a whole. Raises BadConfig and OSError."""
    path = file.path
    text = path.read_text(encoding="utf-8")
    changed = with_scalar(text, str(path), ("canary", "share"), f"{share:g}")
    write_atomically(path, changed, mode=path.stat().st_mode & 0o777, sync=True)

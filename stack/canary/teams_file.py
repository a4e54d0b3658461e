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

    @property
    def models(self) -> frozenset[str] | None:
        """Return the models that both the canary and other upstreams serve, which are compared; None for all."""
        if not self.policy.models:
            return None
        upstreams = self.policy.upstreams
        engines = [name for name, upstream in upstreams.items() if upstream.kind == "engine"]
        return frozenset(
            name
            for name, model in self.policy.models.items()
            if 2 == len({upstreams[each].variant == self.canary.variant for each in model.upstreams or engines})
        )


def read_teams(path: Path) -> TeamsFile:
    """Read and check teams.yaml. Raises BadConfig."""
    policy = load_policy(path)
    if policy.canary is None:
        raise BadConfig(f"{path}: canary is missing; add `canary: {{variant: NAME, share: 0}}` (docs/guides/canary.md)")
    file = TeamsFile(path, policy, policy.canary)
    if file.models is not None and not file.models:
        raise BadConfig(
            f"{path}: no model is served by the canary {file.canary.variant!r} and by another upstream as well; add one"
            " of each to `upstreams` of a model"
        )
    return file


def write_share(file: TeamsFile, share: float) -> None:
    """Write the file with another share, as a whole, with its mode and owner. A link stays, and its target changes.

    Raises BadConfig and OSError."""
    path = file.path.resolve()
    text, owner = path.read_text(encoding="utf-8"), path.stat()
    changed = with_scalar(text, str(path), ("canary", "share"), share_text(share))
    write_atomically(path, changed, owner.st_mode & 0o777, sync=True, owner=(owner.st_uid, owner.st_gid))


def share_text(share: float) -> str:
    """Return a share as YAML reads it back: without an exponent, and to the last bit where that has one."""
    if share == int(share):
        return str(int(share))
    return repr(share) if "e" not in repr(share) else f"{share:.20f}".rstrip("0")

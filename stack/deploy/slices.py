"""First start of compose.mig.yml: each team's MIG instance, key and teams.yaml.

The compose service `init` runs this module, a team's own one adds the team's name. As in init.py, what
exists is never replaced; the sidecar's file alone is written anew at each start, because it follows the environment."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from stack.config import BadConfig
from stack.deploy import init

_VARIABLE = re.compile("TEAM_[A-Z0-9_]+_MIG")
_SLICE = re.compile("MIG-[0-9A-Za-z/-]+")


def slices(environment: Mapping[str, str]) -> dict[str, str]:
    """The slice of each team, by the name of its variable. Raises BadConfig, with one sentence for the user who sets
    them."""
    found = {name: value.strip() for name, value in environment.items() if _VARIABLE.fullmatch(name)}
    if not found:
        raise BadConfig("no TEAM_..._MIG is set; compose.mig.yml passes one for each team")
    for name, uuid in found.items():
        if not _SLICE.fullmatch(uuid):
            given = f"is {uuid!r}" if uuid else "is not set"
            raise BadConfig(
                f"{name} {given}; give it the UUID of that team's slice, which begins with MIG-, as `nvidia-smi -L`"
                " shows it (docs/guides/mig.md)"
            )
        if twin := next((other for other in found if other < name and found[other] == uuid), None):
            raise BadConfig(f"{twin} and {name} are the same slice; give each team its own")
    return found


def filled(template: str, found: Mapping[str, str]) -> str:
    """The sidecar's file with the slices in their places. Raises BadConfig where a slice is missing on either side."""
    text = Template(template)
    for name in sorted(set(text.get_identifiers()) ^ set(found)):
        where = "the environment of the service init" if name not in found else "the engines of mig/sidecar.yaml"
        raise BadConfig(f"{name} is missing in {where}; a team's variable stands in both")
    return text.substitute(found)


def team(name: str, folder: Path) -> None:
    """This team's key, and a teams.yaml in which its engine is the only one. Raises BadConfig for a name that cannot be
    a team."""
    engine = f"vllm-{name}"
    init.make_keys(folder, {name: "default"}, {engine: {"url": f"http://{engine}:8001"}})


def main(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path = init.FOLDER,
    template: Path = init.SIDECAR_TEMPLATE,
    sidecar: Path = init.SIDECAR,
) -> int:
    """One team's own files where it is named, else everybody's; the exit status."""
    try:
        for name in arguments:
            team(name, folder)
        if not arguments:
            text = filled(template.read_text(), slices(environment))
            init.make_password(folder)
            sidecar.write_text(text)
    except (OSError, BadConfig) as error:
        logging.getLogger("vllm_watch.init").error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))

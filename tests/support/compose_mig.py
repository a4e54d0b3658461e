"""Values of the compose stack on a GPU that several teams share (MIG)."""

from __future__ import annotations

from tests.support.compose_files import DEPLOY, ROOT

MIG, STANDIN = DEPLOY / "compose.mig.yml", ROOT / "tests/support/compose_standins/mig.yml"


GIVEN = {
    "TEAM_A_MIG": "MIG-00000000-0000-5000-8000-00000000000a",
    "TEAM_B_MIG": "MIG-00000000-0000-5000-8000-00000000000b",
}

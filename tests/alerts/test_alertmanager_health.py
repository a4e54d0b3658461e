"""The health check of Alertmanager in compose: a secret that cannot be read makes the service unhealthy, with a
sentence."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from alerts import routing

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "stack/deploy/alertmanager/health.sh"
NOBODY = 65534


@pytest.fixture
def secrets() -> Iterator[Path]:
    """A folder that everybody may enter, with the secrets of a configuration that reads them there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for kind in ("page", "ticket", "deadman"):
            Path(routing.secret_file(kind, name)).write_text("secret\n")
        yield folder


def health(folder: Path, kind: str, *command: str) -> subprocess.CompletedProcess[str]:
    """The check as Alertmanager's user runs it."""
    config = folder / "alertmanager.yml"
    config.write_text(routing.configuration(kind, secrets=str(folder), deadman=kind != "none"))
    as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    with SCRIPT.open() as script:
        return subprocess.run(
            ["sh", "-s", *command],
            stdin=script,
            env={"PATH": "/usr/bin:/bin", "ALERTMANAGER_CONFIG": str(config)},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            **as_nobody,
        )


@pytest.mark.parametrize("kind", routing.RECEIVERS)
@pytest.mark.parametrize("command", ["true", "false"])
def test_readable_secrets_leave_the_verdict_to_the_probe(secrets: Path, kind: str, command: str) -> None:
    done = health(secrets, kind, command)
    assert (int(command == "false"), "", "") == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("kind", [kind for kind in routing.RECEIVERS if kind != "none"])
@pytest.mark.parametrize("name", ["page", "ticket", "deadman"])
def test_secret_that_cannot_be_read_is_unhealthy_with_a_sentence(secrets: Path, kind: str, name: str) -> None:
    Path(routing.secret_file(name, str(secrets))).chmod(0o000)
    done = health(secrets, kind, "true")
    assert 1 == done.returncode
    assert f"alertmanager_{name} cannot be read" in done.stdout
    assert "chmod 644" in done.stdout


def test_secret_that_was_not_given_is_unhealthy_with_a_sentence(secrets: Path) -> None:
    """Compose mounts /dev/null where no file is named."""
    path = Path(routing.secret_file("page", str(secrets)))
    path.unlink()
    path.symlink_to("/dev/null")
    done = health(secrets, "slack", "true")
    assert 1 == done.returncode
    assert "is empty: set VLLM_WATCH_PAGE_FILE" in done.stdout


def test_both_compose_files_ask_it() -> None:
    for file in ("docker-compose.yml", "stack/deploy/compose.secure.yml"):
        text = (ROOT / file).read_text().replace("!override", "").replace("!reset", "")
        test = yaml.safe_load(text)["services"]["alertmanager"]["healthcheck"]["test"]
        assert ["CMD", "sh", "/etc/alertmanager/health.sh"] == test[:3]

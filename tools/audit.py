"""Audit of the dependencies in requirements/run.txt: vulnerabilities by pip-audit, licences from installed metadata.

python -m tools.audit [--pip-audit PROGRAM] [--osv-url URL] [--licences]

Advisories come from an online service: PyPI's, or one that implements OSV (google.github.io/osv.dev/post-v1-query),
such as a company's own. If it does not respond or does not know a package, the audit fails: no answer is no
all-clear. There is no offline mode, because a saved list is out of date."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tools import pins

ROOT = Path(__file__).resolve().parent.parent
# Licences that may stand beside Apache-2.0 in one installation, as SPDX names them or as older metadata spell them.
FINE = (
    "Apache-2.0", "Apache Software License", "MIT", "MIT-0", "MIT License", "BSD-2-Clause", "BSD-3-Clause",
    "3-Clause BSD License", "BSD License",
    "ISC", "PSF-2.0", "Python Software Foundation License", "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)",
)  # fmt: skip
# Licences read from the package's licence file, for packages without metadata.
READ = {"promql-parser": "MIT"}
TIMEOUT_S = 300.0
_NOT_REACHED = (
    "vulnerabilities: not audited, because the advisory service could not be reached or understood; run this where"
    " it can"
)


@dataclass(frozen=True, slots=True)
class Licence:
    """Licence of a distribution; said: '' if its metadata has none."""

    name: str
    said: str

    @property
    def fine(self) -> bool:
        """Return True if every part of it is on our list; of an OR one part is enough."""
        if re.search(r"\([^()]*\b(?:AND|OR)\b", self.said):
            return False  # nested: needs a manual check
        alternatives = [re.split(r"\s+AND\s+|;", part.strip(" ()")) for part in re.split(r"\s+OR\s+", self.said)]
        return bool(self.said) and any(all(_bare(term) in map(_bare, FINE) for term in terms) for terms in alternatives)


def _bare(term: str) -> str:
    """Return a licence name without surrounding brackets."""
    return term.strip(" ()")


def licence(name: str, package: metadata.PackageMetadata) -> Licence:
    """Return the SPDX expression, else the classifiers, else the first line of the free text."""
    fields: dict[str, Any] = package.json
    classified = [
        line.rpartition(" :: ")[2]
        for line in fields.get("classifier", [])
        if line.startswith("License :: ") and line.count("::") > 1
    ]
    free = (fields.get("license") or "").strip().splitlines()
    return Licence(
        name,
        fields.get("license_expression") or "; ".join(classified) or (free[0].strip() if free else READ.get(name, "")),
    )


def licences(pinned: Sequence[pins.Pin]) -> list[Licence]:
    """Return the licences of installed pinned packages; pins for other systems are skipped."""
    installed = {pins.normal(one.metadata["Name"]): one.metadata for one in metadata.distributions()}
    return [licence(pin.name, installed[pin.name]) for pin in pinned if pin.name in installed]


def verdict(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the known vulnerabilities and the unknown packages of a pip-audit report."""
    rows = report["dependencies"]
    found = [
        f"{row['name']} {row['version']}:"
        f" {vuln['id']}{', fixed in ' + ', '.join(vuln['fix_versions']) if vuln['fix_versions'] else ''}"
        for row in rows
        for vuln in row.get("vulns", [])
    ]
    return found, [row["name"] for row in rows if "skip_reason" in row]


def vulnerabilities(program: str, requirements: Path, osv_url: str = "") -> tuple[int, str]:
    """Return exit status and one sentence.

    0: the service knows every package and no vulnerability; 1: vulnerabilities; 2: no answer. osv_url: an OSV query
    URL; such a service cannot distinguish unknown packages from safe ones."""
    command = [
        program,
        "--disable-pip",
        "--require-hashes",
        "--progress-spinner",
        "off",
        "--format",
        "json",
        "-r",
        str(requirements),
    ]
    command += ["--vulnerability-service", "osv", "--osv-url", osv_url] if osv_url else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        found, unasked = verdict(json.loads(done.stdout))
    except FileNotFoundError:
        return 2, f"vulnerabilities: {program} is missing; `make audit` installs it"
    except subprocess.TimeoutExpired:
        return 2, f"{_NOT_REACHED}: it took longer than {TIMEOUT_S:.0f} s"
    except json.JSONDecodeError:
        said = done.stderr.strip().splitlines() or ["nothing"]
        return 2, f"{_NOT_REACHED}; pip-audit's last words: {said[-1][:300]}"
    if unasked:
        return (
            2,
            (
                f"vulnerabilities: not audited, because the advisory service does not know {len(unasked)} packages,"
                f" such as {unasked[0]}"
            ),
        )
    return (1, f"vulnerabilities: {'; '.join(found)}") if found else (0, "vulnerabilities: none known")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the audit. Exit 0: no findings; 1: a vulnerability or a licence; 2: unknown."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.audit", description="Check the packages in requirements/run.txt."
    )
    parser.add_argument("--pip-audit", default="pip-audit", metavar="PROGRAM", help="pip-audit program to run")
    parser.add_argument(
        "--osv-url",
        default="",
        metavar="URL",
        help="query this OSV service instead of PyPI, such as https://api.osv.dev/v1/query",
    )
    parser.add_argument("--licences", action="store_true", help="check licences only, offline")
    options = parser.parse_args(arguments)
    path = ROOT / "requirements" / "run.txt"
    read = licences(pins.read(path.read_text(), path.name))
    for one in read:
        sys.stdout.write(f"{'' if one.fine else 'look at   '}{one.name}: {one.said or 'no licence in its metadata'}\n")
    wrong = [one.name for one in read if not one.fine]
    sys.stdout.write(
        f"licences: {'look at ' + ', '.join(wrong) if wrong else f'{len(read)} packages, all fine beside Apache-2.0'}\n"
    )
    if options.licences:
        return 1 if wrong else 0
    status, sentence = vulnerabilities(options.pip_audit, path, options.osv_url)
    sys.stdout.write(sentence + "\n")
    return status or (1 if wrong else 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Objects of Kubernetes' extensions against the validators and types that npm publishes of their CRDs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CHECK = """
import { readFileSync, readdirSync } from "node:fs";
const folder = process.argv[1], wrong = [];
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const version = object.apiVersion.split("/")[1];
  const end = `${version[0].toUpperCase()}${version.slice(1)}${object.kind}.js`;
  const { validate } = await import(`${folder}/${readdirSync(folder).find((name) => name.endsWith(end))}`);
  if (!validate(object)) wrong.push(...validate.errors.map((e) => `${object.kind}${e.instancePath}: ${e.keyword}`));
}
console.log(JSON.stringify(wrong));
"""
_COMPILER = {
    "strict": True, "noEmit": True, "skipLibCheck": True, "moduleResolution": "bundler", "module": "esnext",
    "target": "es2022", "lib": ["es2022"], "types": [],
}  # fmt: skip


def mistakes(found: Sequence[dict[str, Any]], package: str, folder: Path, node: Path, work: Path) -> list[str]:
    """Return what the validators say of values, and the types of unknown fields, which validators let pass.

    package: of npm, below folder."""
    modules = folder / "node_modules"
    check = [node, "--input-type=module", "-e", _CHECK, modules / package / "_schemas"]
    done = subprocess.run(check, input=json.dumps(found), capture_output=True, text=True, check=True, timeout=60)
    rows = []
    for at, each in enumerate(found):
        kind = each["kind"]
        rows.append(f"import type {{ I{kind} as I{at} }} from '{package}/{each['apiVersion']}/{kind}';")
        rows.append(f"const o{at}: I{at} = {json.dumps(each)};")
    work.mkdir()
    (work / "node_modules").symlink_to(modules)
    (work / "objects.ts").write_text("\n".join(rows))
    (work / "tsconfig.json").write_text(json.dumps({"compilerOptions": _COMPILER, "files": ["objects.ts"]}))
    compiler = [node, modules / "typescript/lib/tsc.js", "--project", work, "--pretty", "false"]
    typed = subprocess.run(compiler, capture_output=True, text=True, check=False, timeout=120)
    assert (typed.returncode == 0) == (not typed.stdout), typed.stdout + typed.stderr
    return [*json.loads(done.stdout), *typed.stdout.splitlines()]

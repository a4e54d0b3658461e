"""`make bench-faults`: the fault table done to mtail and to the sidecar, and what each lost, counted twice or made up.

Same files, same order, same pace. What is a fault of a reader's restart is judged as Prometheus would: what it showed
last before it died is kept.
Method and results: docs/internals/faults.md."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("VLLM_WATCH_KILLS", "23")

from stack.lab import install
from tests.support.fault_table import CASES, Case, Log, Mtail, Sidecar, run


def with_mtail(case: Case, root: Path, program: Path) -> str:
    root.mkdir()
    reader, log = Mtail(root, program), Log(root / case.team)
    try:
        run(case, reader, log)
        found, truth = reader.ids(), Counter(log.ids)
    finally:
        reader.stop()
    wrong = {
        "lost": truth - found,
        "twice": Counter({number: found[number] - 1 for number in truth if found[number] > 1}),
        "made up": Counter({number: times for number, times in found.items() if number not in truth}),
    }
    words = [f"{ids.total()} {word}" for word, ids in wrong.items() if ids.total()]
    return f"{', '.join(words)} of {len(log.ids)}" if words else "exact"


def with_sidecar(case: Case, reader: Sidecar) -> str:
    log = Log(reader.root / case.team)
    found = run(case, reader, log)
    return "exact" if found == log.truth else f"{found.count - len(log.ids):+d} of {len(log.ids)}"


def main() -> int:
    program = install.install(["mtail"], print)["mtail"]
    with tempfile.TemporaryDirectory() as folder:
        ours = Sidecar(Path(folder), [case.team for case in CASES])
        rows = []
        try:
            print(f"|  | case | mtail {program.version} | vllm-watch |\n|---:|---|---|---|")
            for case in CASES:
                rows.append(
                    (
                        case,
                        with_mtail(case, Path(folder, f"mtail-{case.number}"), program.path),
                        with_sidecar(case, ours),
                    )
                )
                print("| {0.number} | {0.title} | {1} | {2} |".format(*rows[-1]), flush=True)
        finally:
            ours.close()
    exact = [sum(row[at] == "exact" for row in rows) for at in (1, 2)]
    print(
        f"\nexact: mtail {exact[0]} of {len(rows)}, vllm-watch {exact[1]} of {len(rows)}; {ours.scrapes} scrapes,"
        f" {len(ours.fell)} counters fell"
    )
    return int(exact[1] < len(rows) or bool(ours.fell))


if __name__ == "__main__":
    sys.exit(main())

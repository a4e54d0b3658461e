"""Run one module of the application: `python -m vllm_watch.module stack.deploy.probe https://localhost:8010/metrics`.

Also run by its path (`module_command`), where `vllm_watch` itself may not be importable."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m vllm_watch.module MODULE [ARGUMENTS]")
    above = str(Path(__file__).resolve().parent.parent)
    if above not in sys.path:
        sys.path.append(above)
    from vllm_watch import use_application

    use_application()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

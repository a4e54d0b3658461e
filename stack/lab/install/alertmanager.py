"""Alertmanager from Debian, with its templates moved: the program reads them from one absolute folder. Here it is
unpacked without root, so the program gets a path of the same length, relative to the folder it is started in."""

from __future__ import annotations

from pathlib import Path

WRITTEN_IN = b"/usr/share/prometheus/alertmanager"


def relative(length: int) -> bytes:
    """`./share` as a path of exactly this many bytes; slashes and dots add nothing to where it leads."""
    path = b"./share/"
    return (path + b"./" * ((length - len(path)) // 2)).ljust(length, b"/")


def relocated(program: bytes) -> bytes:
    """The program with the templates' folder relative to where it runs. Raises ValueError when it holds no such path:
    it changed upstream."""
    if WRITTEN_IN not in program:
        raise ValueError(f"this Alertmanager does not name {WRITTEN_IN.decode()}")
    return program.replace(WRITTEN_IN, relative(len(WRITTEN_IN)))


def make_runnable(folder: Path) -> Path:
    """Beside an unpacked package, a script that runs it from anywhere; the path of that script.

    Where the templates are installed after all, or the program no longer looks for them, it is used as it is. Raises
    OSError."""
    program, script = folder / "usr/bin/prometheus-alertmanager", folder / "run/alertmanager"
    if Path(WRITTEN_IN.decode(), "default.tmpl").exists():
        return program
    try:
        code = relocated(program.read_bytes())
    except ValueError:
        return program
    script.parent.mkdir(exist_ok=True)
    share = script.parent / "share"
    if not share.exists():
        share.symlink_to(folder / WRITTEN_IN.decode().lstrip("/"))
    (script.parent / "program").write_bytes(code)
    (script.parent / "program").chmod(0o755)
    # Paths on the command line are the caller's: only those that are absolute mean the same after the change of folder.
    script.write_text(f'#!/bin/sh\ncd "{script.parent}" && exec ./program "$@"\n')
    script.chmod(0o755)
    return script

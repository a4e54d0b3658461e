"""Program from Debian, run with the libraries of its own suite: they are unpacked beside it, loader and C library
included, so that a newer build runs on an older system without root."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from stack.lab.install.cache import PartMissing

_COMMON = ("libc6", "libsystemd0", "libatomic1", "liblzf1", "libjemalloc2", "libstdc++6", "libgcc-s1", "libzstd1")
OF_VALKEY = ("valkey-tools", *_COMMON, "libssl3t64", "libhdr-histogram6", "liblua5.1-0", "libcap2")
OF_REDIS = (
    "redis-tools", *_COMMON, "libssl3t64", "libhdr-histogram6", "liblua5.1-0", "lua-cjson", "lua-bitop", "libcap2",
)  # fmt: skip
OF_HAPROXY = (
    *_COMMON, "libcrypt1", "libssl3t64", "liblua5.4-0", "libpcre2-8-0", "libopentracing-c-wrapper0t64",
    "libopentracing1", "zlib1g", "libcap2",
)  # fmt: skip


def make_runnable(program: Path, folder: Path, beside: Sequence[Path]) -> Path:
    """Write a script that starts `program` with the libraries of the unpacked packages; return its path.

    The program itself may be a link to one of another package, whose name decides what it does. Raises PartMissing
    where no package has the program or the loader."""
    unpacked = (folder, *beside)
    target = program.readlink().name if program.is_symlink() else program.name
    folders = (root / place for root in unpacked for place in ("usr/bin", "usr/sbin"))
    real = next((path for place in folders if (path := place / target).is_file()), None)
    loader = next((path for root in unpacked for path in sorted(root.glob("usr/lib/*/ld-linux*.so.*"))), None)
    if real is None or loader is None:
        raise PartMissing(f"Debian's packages of {program.name} hold no {target if real is None else 'loader'}.")
    libraries = ":".join(str(path) for root in unpacked for path in sorted(root.glob("usr/lib/*-linux-gnu*")))
    script = folder / "run" / program.name
    script.parent.mkdir(exist_ok=True)
    words = (loader, "--argv0", program.name, "--library-path", libraries, real)
    script.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
    script.chmod(0o755)
    return script

"""What a process holds, as Linux tells it: proc_pid_status(5)."""

from __future__ import annotations

from pathlib import Path

RESIDENT = ("VmRSS",)
OWN = ("RssAnon", "RssShmem", "VmSwap")  # without pages of files, which the kernel takes and gives back as it likes


def mib(pid: int | str = "self", kinds: tuple[str, ...] = OWN) -> float:
    """MiB of these kinds. Raises OSError when the process is gone."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(status.get(kind, "0 kB").split()[0]) for kind in kinds) / 1024

"""A cache folder of `vllm-watch` that has all installed parts and no lab of anybody else."""

from __future__ import annotations

import shutil
from pathlib import Path

from stack.lab import install


def own_cache(folder: Path) -> Path:
    """Make the folder: parts are links to the real ones, stamps are copies."""
    folder.mkdir(exist_ok=True)
    real = install.cache_dir()
    for entry in real.iterdir():
        if not entry.name.startswith(("lab", "drill", "stamps", "locks")):
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(real / "stamps", folder / "stamps")
    return folder

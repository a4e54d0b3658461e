"""Model configurations for the tests of capacity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stack.capacity.model import ModelShape, shape

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"


NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


REFUSED = {"DeepSeek-V3.2"}


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def model(name: str) -> ModelShape:
    return shape(config(name), name)

"""Copies of the lab's model with one thing changed. Run by the engine's own Python, which has safetensors and torch:
model_damage.py KIND SOURCE TARGET."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

KINDS = ("flip", "nan", "template", "tokenizer")
WEIGHT = "model.layers.1.mlp.down_proj.weight"


def damage(kind: str, source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    if kind in ("flip", "nan"):
        from safetensors.torch import load_file, save_file  # type: ignore[import-not-found,unused-ignore]

        weights = load_file(target / "model.safetensors")
        # one value of one layer
        weights[WEIGHT][3, 5] *= -1 if kind == "flip" else float("nan")
        save_file(weights, target / "model.safetensors", {"format": "pt"})
    elif kind == "template":
        template = target / "chat_template.jinja"
        template.write_text(template.read_text().replace("{{ message['content'] }}", " {{ message['content'] }}"))
        assert template.read_text() != (source / "chat_template.jinja").read_text()
    elif kind == "tokenizer":
        words = json.loads((target / "tokenizer.json").read_text())
        merges = words["model"]["merges"]
        words["model"]["merges"] = [pair for number, pair in enumerate(merges) if number % 7]  # a revision
        (target / "tokenizer.json").write_text(json.dumps(words))


if __name__ == "__main__":
    damage(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

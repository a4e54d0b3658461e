"""Copies of the lab's model with one thing changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

KINDS = ("flip", "nan", "template", "tokenizer")
WEIGHT, ROW, COLUMN = "model.layers.1.mlp.down_proj.weight", 3, 5
LENGTH_BYTES = 8  # of a safetensors file's header, before it
NAN = {"F32": b"\0\0\xc0\x7f", "BF16": b"\xc0\x7f"}


def damage(kind: str, source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    if kind in ("flip", "nan"):
        _change_weight(kind, target / "model.safetensors")
    elif kind == "template":
        template = target / "chat_template.jinja"
        template.write_text(template.read_text().replace("{{ message['content'] }}", " {{ message['content'] }}"))
        assert template.read_text() != (source / "chat_template.jinja").read_text()
    elif kind == "tokenizer":
        words = json.loads((target / "tokenizer.json").read_text())
        merges = words["model"]["merges"]
        words["model"]["merges"] = [pair for number, pair in enumerate(merges) if number % 7]  # a revision
        (target / "tokenizer.json").write_text(json.dumps(words))


def _change_weight(kind: str, file: Path) -> None:
    """One value of one layer: its sign, or to no number."""
    data = bytearray(file.read_bytes())
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    tensor = json.loads(data[LENGTH_BYTES:start])[WEIGHT]
    size = len(NAN[tensor["dtype"]])
    at = start + tensor["data_offsets"][0] + (ROW * tensor["shape"][1] + COLUMN) * size
    if kind == "flip":
        data[at + size - 1] ^= 0x80
    else:
        data[at : at + size] = NAN[tensor["dtype"]]
    file.write_bytes(data)

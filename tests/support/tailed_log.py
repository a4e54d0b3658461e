"""A request log that grows, and the tailer that reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from exporters.requests.positions import Position
from exporters.requests.tail import Tail


def stored(tail: Tail) -> tuple[Position, ...]:
    """Its positions, through a file and back."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(tail.positions()), type=tuple[Position, ...])


def again(tail: Tail, **settings) -> Tail:
    """The same tail after a SIGKILL and a new start from its stored positions."""
    positions = stored(tail)
    tail.close()
    return Tail(tail.path, positions, **settings)


def add(path: Path, *lines: object) -> None:
    with path.open("ab") as file:
        file.writelines(f"{line}\n".encode() for line in lines)


def lines_of(block: bytes) -> list[bytes]:
    """The lines of a block that are not blank, without their ends."""
    return [line.rstrip(b"\r") for line in block.split(b"\n") if line and not line.isspace()]


def polled(tail: Tail, now_s: float, **settings) -> list[bytes]:
    """The lines of one poll, whose blocks hold nothing else."""
    blocks = tail.poll(now_s, **settings)
    assert all(block.endswith(b"\n") and b"\0" not in block and not block.isspace() for block in blocks)
    return [line for block in blocks for line in lines_of(block)]


def drained(tail: Tail, from_s: float = 0.0) -> list[bytes]:
    """What several polls hand out, over half a minute."""
    return [line for second in range(30) for line in polled(tail, from_s + second)]

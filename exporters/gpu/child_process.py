"""Child process whose output is bounded and which can be killed with its group, even while a pipe is held open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from exporters.gpu.readings import GpuUnavailable

_MOST_OUTPUT_BYTES = 1 << 20


class ChildProcess:
    """A started program in a process group of its own. Its pipes are ours, so they can be let go even while someone
    holds the far end."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        out: asyncio.StreamReader,
        err: asyncio.StreamReader,
        held: Sequence[asyncio.BaseTransport],
    ):
        self.process, self.out, self.err, self._held = process, out, err, held

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str] | None, stdin: int) -> ChildProcess:
        """Raises OSError when there is no such program."""
        readers: list[asyncio.StreamReader] = []
        held: list[asyncio.BaseTransport] = []
        far: list[int] = []
        try:
            for _ in range(2):
                ours, theirs = os.pipe()
                far.append(theirs)
                reader = asyncio.StreamReader(limit=_MOST_OUTPUT_BYTES)
                held.append(await _connect(reader, ours))
                readers.append(reader)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=far[0], stderr=far[1], env=env, start_new_session=True
            )  # fmt: skip
        except BaseException:
            for transport in held:
                transport.close()
            raise
        finally:
            for end in far:
                os.close(end)
        return cls(process, readers[0], readers[1], held)

    def kill(self) -> None:
        """SIGKILL to the whole group, then let the pipes go. Does not wait."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.close_pipes()

    def close_pipes(self) -> None:
        for transport in self._held:
            transport.close()
        if self.process.stdin:
            self.process.stdin.close()


async def _connect(reader: asyncio.StreamReader, fd: int) -> asyncio.BaseTransport:
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return transport


async def read_output(reader: asyncio.StreamReader) -> str:
    text = bytearray()
    while chunk := await reader.read(1 << 16):
        text += chunk
        if len(text) > _MOST_OUTPUT_BYTES:
            raise GpuUnavailable("parse", f"nvidia-smi printed more than {_MOST_OUTPUT_BYTES} bytes: this is no report")
    return text.decode(errors="replace")

"""Record what the program puts out, and compare it with what is recorded.

manifest.yaml names the parts, their entries, and the commands of each; scenes.py has what no command makes. Every entry
is recorded below `recorded/PART/`: its commands with their output as one text, and each file that they write, JSON and
YAML as sorted parsed objects. Commands run in this process, in a copy of inputs/.

`make outputs ARGS="[--accept] [--days-ahead N] [--timezone NAME] [PART ...]"`. Exit 1 where something differs."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import time_machine
import yaml
from click.testing import CliRunner

from stack.cli import main as command_line
from stack.lab.install.cache import cache_dir
from stack.root import ROOT
from tests.outputs import scenes
from tests.outputs.normalise import Normaliser, canonical, digest, objects, readable, with_references, without_assets

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded"
INPUTS = FOLDER / "inputs"
WIDTH = "240"  # of tables; no cell is cut
KEPT = ("PATH", "TMPDIR", "LD_LIBRARY_PATH")
Recording = dict[str, str]  # path below recorded/ -> text


@dataclass(frozen=True)
class Setting:
    """Clock and time zone of a run, which no recording may depend on."""

    days_ahead: float = 0.0
    timezone: str = "UTC"

    @contextlib.contextmanager
    def entered(self, home: Path) -> Iterator[None]:
        """Move the clock and the time zone of this process; of its environment keep what programs need to run."""
        environment = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PYTHON")}
        environment |= {"HOME": str(home), "VLLM_WATCH_CACHE": str(cache_dir()), "TZ": self.timezone}
        environment |= {"COLUMNS": WIDTH, "NO_COLOR": "1", "LANG": "C.UTF-8"}
        with contextlib.ExitStack() as stack:
            stack.callback(time.tzset)
            stack.enter_context(patch.dict(os.environ, environment, clear=True))
            time.tzset()
            if self.days_ahead:
                ahead_s = time.time() + 86400 * self.days_ahead
                stack.enter_context(time_machine.travel(ahead_s, tick=True))
            yield


def manifest() -> dict[str, dict[str, Any]]:
    """Return the entries of each part, by name."""
    parts: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "manifest.yaml").read_text())
    return parts


def record(part: str, setting: Setting) -> Recording:
    """Run the entries of a part; return what they put out. A document that is repeated is named after the first."""
    made: Recording = {}
    known: dict[str, str] = {}
    for entry, content in manifest()[part].items():
        made |= _record_entry(f"{part}/{entry}", content, setting, known)
    return made


def _record_entry(name: str, content: Any, setting: Setting, known: dict[str, str]) -> Recording:
    content = content if isinstance(content, dict) else {"run": content}
    with tempfile.TemporaryDirectory() as folder:
        work, out = Path(folder).resolve() / "work", Path(folder).resolve() / "out"
        shutil.copytree(INPUTS, work)
        (work / "repo").symlink_to(ROOT)
        out.mkdir()
        with contextlib.chdir(work), setting.entered(work / "home"):
            normal = Normaliser({str(out): "OUT", str(work): ".", str(ROOT): "<root>"}, content.get("replace", ()))
            transcript, files = _made(content, work, out)
            made = {f"{name}.txt": normal(transcript)} if transcript else {}
            if content.get("digest"):
                hashed = [f"{_digest(f'{name}/{file}', normal(text), known)}  {file}\n" for file, text in files.items()]
                return made | {f"{name}.digests": "".join(hashed)}
            for file, text in files.items():
                made |= _recording(f"{name}/{file}", text, known, normal)
            return made


def _made(content: Mapping[str, Any], work: Path, out: Path) -> tuple[str, dict[str, str]]:
    """Return what the commands of an entry print, and the files that they or a scene make."""
    if scene := content.get("scene"):
        return "", scenes.SCENES[scene](work)
    if patterns := content.get("files"):
        paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
        return "", {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    with scenes.serving(content.get("with"), work) as addresses, _clock(content.get("at")):
        printed = [f"$ vllm-watch {line}\n{_run(line, out, addresses)}" for line in content["run"]]
    return "\n".join(printed), _texts(out)


def _texts(folder: Path) -> Recording:
    """Return the text of each file below a folder, with its line ends as they are."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()] if folder.is_dir() else []
    return {str(path.relative_to(folder)): path.read_bytes().decode() for path in paths}


def _clock(at: str | None) -> contextlib.AbstractContextManager[object]:
    """Stop the clock at a time, for commands that look back from now."""
    return time_machine.travel(at, tick=False) if at else contextlib.nullcontext()


def _run(line: str, out: Path, addresses: Mapping[str, str]) -> str:
    places = {"OUT": str(out)} | {name.upper(): address for name, address in addresses.items()}
    pattern = re.compile(rf"\b({'|'.join(places)})\b")
    words = [pattern.sub(lambda found: places[found[1]], word) for word in shlex.split(line)]
    done = CliRunner().invoke(command_line, words, prog_name="vllm-watch")
    text = done.output
    if done.exception and not isinstance(done.exception, SystemExit):
        raise RuntimeError(f"vllm-watch {line}: {done.exception!r}") from done.exception
    return text + (f"(exit status {done.exit_code})\n" if done.exit_code else "")


def _recording(name: str, text: str, known: dict[str, str], normal: Normaliser) -> Recording:
    """Return a file as sorted parsed objects, if it is JSON or YAML; a document that is known, by its name."""
    try:
        parsed = objects(name, text)
    except (ValueError, yaml.YAMLError):
        return {name: normal(without_assets(text))}
    if not isinstance(parsed, dict | list):
        return {name: normal(text)}
    shown = readable(with_references(parsed, known)) + "\n"
    known.setdefault(canonical(parsed), name)
    return {name if name.endswith(".json") else f"{name}.json": normal(shown)}


def _digest(name: str, text: str, known: dict[str, str]) -> str:
    """Return the hash of a file; what it holds is known from then on."""
    with contextlib.suppress(ValueError, yaml.YAMLError):
        text = canonical(objects(name, text))
        known.setdefault(text, name)
    return digest(text)


# ---- comparing


def recorded(part: str) -> Recording:
    """Return what is recorded of a part."""
    return {f"{part}/{name}": text for name, text in _texts(RECORDED / part).items()}


def difference(before: Recording, after: Recording) -> list[str]:
    """Return the lines of a unified diff, file by file."""
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, ""), after.get(name, "")
        if old != new:
            before_lines, after_lines = (text.replace("\r", "<CR>").split("\n") for text in (old, new))
            lines += difflib.unified_diff(before_lines, after_lines, f"recorded/{name}", f"now/{name}", lineterm="")
    return lines


def summary(before: Recording, after: Recording) -> list[str]:
    """Return one line for each recording that changed: how many lines came and went."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        diff = difference({name: before[name]} if name in before else {}, {name: after[name]} if name in after else {})
        if diff:
            came, went = (sum(line.startswith(sign) for line in diff[2:]) for sign in "+-")
            what = "changed" if name in before and name in after else "new" if name in after else "gone"
            lines.append(f"{what:8} {name} (+{came} -{went})")
    return lines


def write(part: str, made: Recording) -> None:
    """Replace what is recorded of a part."""
    shutil.rmtree(RECORDED / part, ignore_errors=True)
    for name, text in made.items():
        path = RECORDED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make outputs", description="Compare outputs with their recordings.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all by default: {', '.join(manifest())}")
    parser.add_argument("--accept", action="store_true", help="record the outputs anew; print what changed")
    parser.add_argument("--days-ahead", type=float, default=0.0, metavar="N", help="move the clock")
    parser.add_argument("--timezone", default="UTC", metavar="NAME", help="time zone of the run")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(manifest()):
        parser.error(f"no part {', '.join(sorted(unknown))}; parts: {', '.join(manifest())}")
    return given


def main() -> int:
    given = _arguments()
    setting, parts = Setting(given.days_ahead, given.timezone), given.parts or list(manifest())
    before: Recording = {}
    after: Recording = {}
    failures: list[str] = []
    times = {}
    forked = multiprocessing.get_context("fork")  # with all that is imported here
    with ProcessPoolExecutor(max_workers=2, mp_context=forked) as pool:
        for part, (made, failure, took_s) in zip(parts, pool.map(_timed, parts, [setting] * len(parts)), strict=True):
            times[part] = took_s
            if failure:
                failures.append(f"{part}: {failure}")
                continue
            before |= recorded(part)
            after |= made
            if given.accept:
                write(part, made)
    lines = summary(before, after) if given.accept else difference(before, after)
    sys.stdout.writelines(f"{line}\n" for line in (*lines, *failures))
    size = sum(len(text.encode()) for text in after.values())
    slowest = ", ".join(f"{part} {took:.0f} s" for part, took in sorted(times.items(), key=lambda one: -one[1])[:3])
    changed = len(summary(before, after))
    verb = "recorded anew" if given.accept else "differ"
    sys.stdout.write(f"outputs: {len(after)} of {size / 1e6:.1f} MB, {changed} {verb} ({slowest})\n")
    if changed and not given.accept:
        sys.stdout.write(f"if that is meant: make outputs ARGS='{' '.join(('--accept', *given.parts))}'\n")
    return bool(failures) or (bool(changed) and not given.accept)


def _timed(part: str, setting: Setting) -> tuple[Recording, str, float]:
    """Return the recording of a part, or why there is none, and the seconds that it took."""
    logging.getLogger().addHandler(logging.NullHandler())  # the output of commands alone is recorded
    began = time.perf_counter()
    try:
        return record(part, setting), "", time.perf_counter() - began
    except Exception as error:  # of whatever a changed program does
        return {}, f"{type(error).__name__}: {error}", time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())

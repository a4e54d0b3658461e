"""Outputs that no single command makes, and the servers that commands of the manifest ask."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import click
import yaml
from click.testing import CliRunner

from exporters.config import BadConfig
from exporters.config import load as load_config
from stack import config
from stack.bench import workload_file
from stack.canary.teams_file import read_teams
from stack.capacity import worksheet
from stack.cli import COMMANDS, DEVELOPMENT, Later
from stack.cli import main as command_line
from stack.deploy.helm.chart import CHART
from stack.gateway.config import GatewayConfig
from stack.gateway.teams import load_policy
from stack.root import ROOT
from stack.tuning import experiment
from tests.outputs import expositions, replies
from tests.outputs.features import features as listed_features
from tests.support import fake_grafana, parts
from tests.support.past_prometheus import past_prometheus
from tests.support.ports import free_port
from tests.support.scoring_engine import ScoringEngine

FOLDER = Path(__file__).parent
Texts = dict[str, str]  # file name -> text


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command, groups included."""
    command = command.real() if isinstance(command, Later) else command
    yield words
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            if (below := command.get_command(click.Context(command), name)) is not None:
                yield from leaves(below, (*words, name))


def helps(work: Path) -> Texts:
    """Return the help of each command, one file for each word that begins one."""
    del work
    texts = {"vllm-watch.txt": _help(())}
    for first in (*COMMANDS, *DEVELOPMENT):
        texts[f"{first.name}.txt"] = "\n".join(_help(words) for words in leaves(first, (str(first.name),)))
    return texts


def _help(words: Iterable[str]) -> str:
    done = CliRunner().invoke(command_line, [*words, "--help"], prog_name="vllm-watch")
    assert 0 == done.exit_code, done.output
    return f"$ vllm-watch {' '.join((*words, '--help'))}\n{done.output}"


def features(work: Path) -> Texts:
    """Return the list of what may not go without a reason in the changelog."""
    del work
    return {"features.txt": "".join(f"{line}\n" for line in listed_features())}


# ---- mistakes in configuration files

READERS: dict[str, Callable[[Path], object]] = {
    "gateway": lambda path: load_config(path, GatewayConfig),
    "teams": load_policy,
    "sidecar": config.sidecar,
    "ship": config.ship,
    "worksheet": lambda path: worksheet.parse(path.read_text(), path.name),
    "workload": workload_file.load,
    "experiment": experiment.load,
    "canary": read_teams,
}
COMMANDS_OF = {"thresholds": ["alerts", "list", "--thresholds"], "slo": ["alerts", "slo"]}


def mistakes(work: Path) -> Texts:
    """Return what each configuration file of mistakes.yaml is answered with."""
    texts = {}
    folder = work / "mistakes"
    folder.mkdir()
    for kind, files in yaml.safe_load((work / "mistakes.yaml").read_text()).items():
        answers = []
        for text in files:
            path = folder / f"{kind}.yaml"
            path.write_text(text)
            answers.append(f"{text}\n-> {_answer(kind, path)}\n")
        texts[f"{kind}.txt"] = "\n".join(answers)
    return texts


def _answer(kind: str, path: Path) -> str:
    if kind in COMMANDS_OF:
        done = CliRunner().invoke(command_line, [*COMMANDS_OF[kind], str(path)])
        return f"(exit status {done.exit_code}) {done.stderr.strip()}"
    try:
        READERS[kind](path)
    except (BadConfig, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# ---- servers that commands ask


@contextlib.contextmanager
def serving(names: list[str] | None, work: Path) -> Iterator[dict[str, str]]:
    """Start the servers of an entry; yield their addresses by name."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(_SERVERS[name](work)) for name in names or ()}


@contextlib.contextmanager
def _prometheus(work: Path) -> Iterator[str]:
    """Hold the series of *.om.gz in a real Prometheus."""
    folder = work / "prometheus"
    folder.mkdir()
    page = folder / "page.om"
    texts = [gzip.decompress(path.read_bytes()).decode() for path in sorted(work.glob("*.om.gz"))]
    page.write_text("".join(text.replace("# EOF\n", "").rstrip("\n") + "\n" for text in texts) + "# EOF\n")
    with past_prometheus(_part, page, folder, free_port()) as url:
        yield url


def _part(name: str) -> Path:
    if (found := parts.find(name)) is None:
        raise RuntimeError(f"{name} is not installed; {parts.remedy(name)}")
    return found.path


@contextlib.contextmanager
def _situations(work: Path) -> Iterator[str]:
    """The captured pages of the doctor's situations, unpacked."""
    for packed in (ROOT / "tests/situations").glob("*/*.gz"):
        path = work / "situations" / packed.relative_to(ROOT / "tests/situations").with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.decompress(packed.read_bytes()))
    yield str(work / "situations")


@contextlib.contextmanager
def _scoring(work: Path) -> Iterator[str]:
    """A fake engine that scores prompts, in a thread of its own."""
    del work
    loop, url, ended = asyncio.new_event_loop(), Future[str](), asyncio.Event()

    async def serve() -> None:
        async with ScoringEngine().running() as address:
            url.set_result(address)
            await ended.wait()

    thread = Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield url.result(30)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@contextlib.contextmanager
def _grafana(work: Path) -> Iterator[str]:
    """A fake Grafana, with the token that it takes in grafana.token."""
    (work / "grafana.token").write_text(fake_grafana.EDITOR)
    (work / "grafana.token").chmod(0o600)
    with fake_grafana.FakeGrafana() as grafana:
        yield grafana.url


_SERVERS = {"prometheus": _prometheus, "grafana": _grafana, "situations": _situations, "scoring": _scoring}


# ---- the chart


def chart(work: Path) -> Texts:
    """Return the objects of the chart as Helm renders them, for a few sets of values, and its notes."""
    del work
    from helm_python import Chart  # late: 85 MB of Helm itself

    texts = {}
    for name, given in yaml.safe_load((FOLDER / "inputs/chart-values.yaml").read_text()).items():
        with Chart.load(str(ROOT / CHART)) as chart:
            rendered = chart.render(values=given, name="vllm-watch", namespace="vllm")
        texts |= {f"{name}/{template}": text for template, text in rendered.items()}
    return texts


SCENES: dict[str, Callable[[Path], Texts]] = {
    "helps": helps,
    "features": features,
    "mistakes": mistakes,
    "sidecar": expositions.sidecar,
    "checkpoint": expositions.checkpoint,
    "gateway": replies.gateway,
    "chart": chart,
}

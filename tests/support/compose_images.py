"""The images that docker-compose.yml names, on a private Docker engine: the real programs where this machine has any,
laid out as the real images lay them out.

They are made once per machine. The cache keeps two files of `docker save`, one of others' images and one of ours, each
named after a hash of all that it was made of."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stack.lab.install import InstalledPart, cache_dir
from tests.support.compose_files import ROOT
from tests.support.compose_standins.private_docker import PrivateDocker, debian_root, wheelhouse

BASE, PYTHON = "standin-base", "python:3.11-slim-bookworm"
PROGRAMS = ("engine", "prometheus", "promtool", "alertmanager", "amtool", "otelcol", "valkey", "haproxy")
STANDINS = Path(__file__).parent / "compose_standins"
KEPT = 2  # files of each kind

Part = Callable[[str], InstalledPart]


def make(docker: PrivateDocker, images: Mapping[str, str], part: Part) -> None:
    """Give the engine each image, by the name that it has for a service."""
    part("iproute2")  # the engine gets networks of its own
    root, wheels = debian_root(part("mmdebstrap").path, cache_dir()), wheelhouse(cache_dir(), ROOT / "requirements")
    recipe = _hash(_file_parts([root, wheels, *(part(name).path for name in PROGRAMS)]), _contents(_recipe_files()))
    others = Kept("others", recipe + repr(sorted(images.items())))
    ours = Kept("ours", recipe + _hash(_contents(_sources())))
    has_others = others.load(docker)
    if not has_others:
        _make_python(docker, root, wheels)
    with concurrent.futures.ThreadPoolExecutor(1) as alongside:
        building = alongside.submit(_make_ours, docker, ours)
        if not has_others:
            _make_others(docker, images, part)
            others.save(docker, {BASE, PYTHON, *images.values()} - {images["gateway"]})
        building.result()
    assert images["gateway"] in docker.run("images", "--format", "{{.Repository}}:{{.Tag}}").splitlines()


class Kept:
    """Images in the cache. made_of: names all that they depend on."""

    def __init__(self, kind: str, made_of: str) -> None:
        self._folder, self._kind = cache_dir() / "compose-test", kind
        self.path = self._folder / f"images-{kind}-{_hash([made_of])[:16]}.tar"

    def load(self, docker: PrivateDocker) -> bool:
        """Return whether there were any."""
        if not self.path.exists():
            return False
        self.path.touch()
        docker.run("load", "--quiet", "--input", str(self.path), timeout_s=300)
        return True

    def save(self, docker: PrivateDocker, names: set[str]) -> None:
        partial = self.path.with_suffix(f".partial-{os.getpid()}")
        docker.run("save", "--output", str(partial), *sorted(names), timeout_s=300)
        partial.rename(self.path)
        files = sorted(self._folder.glob(f"images-{self._kind}-*.tar"), key=lambda path: path.stat().st_mtime)
        for old in files[:-KEPT]:
            old.unlink(missing_ok=True)


def _make_ours(docker: PrivateDocker, kept: Kept) -> None:
    if kept.load(docker):
        return
    made = docker.typed("make image ARGS='--network none'", {"DOCKER_BUILDKIT": "0"}, ROOT, timeout_s=600)
    assert 0 == made.returncode, made.stderr[-3000:]
    (name,) = re.findall(r"^Successfully tagged (\S+)$", made.stdout, re.MULTILINE)
    kept.save(docker, {name})


def _make_python(docker: PrivateDocker, root: Path, wheels: Path) -> None:
    docker.run("import", str(root), BASE)
    pip = "cp -r /wheelhouse /wheels; printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf"
    tools = "ln -s python3 /usr/bin/python; ln -s /usr/bin/busybox /usr/local/bin/wget"
    docker.adopt(PYTHON, BASE, inside=f"{pip}; {tools}", mounts=[f"{wheels}:/wheelhouse"])


def _make_others(docker: PrivateDocker, images: Mapping[str, str], part: Part) -> None:
    engine = part("engine").path.parent
    docker.adopt(images["vllm"], PYTHON, changes=[f"ENV PATH={engine}:/usr/local/bin:/usr/bin:/bin"])
    for program, tool, folder in (
        ("prometheus", "promtool", "/prometheus"),
        ("alertmanager", "amtool", "/alertmanager"),
    ):
        docker.adopt(
            images[program], PYTHON, mounts=[*_as_mounts(part(program)), f"{part(tool).path}:/tool"],
            inside=f"cp /from /bin/{program}; cp /tool /bin/{tool}; install -d -o 65534 -g 65534 {folder}; "
            "if [ -d /share ]; then cp -r /share /usr/share/prometheus; fi",
            changes=["USER 65534:65534", f"WORKDIR {folder}", f'ENTRYPOINT ["/bin/{program}"]'],
        )  # fmt: skip
    docker.adopt(
        images["otelcol"], PYTHON, mounts=[f"{part('otelcol').path}:/from"], inside="cp /from /otelcol",
        changes=["USER 10001", 'ENTRYPOINT ["/otelcol"]'],
    )  # fmt: skip
    _adopt_unpacked(docker, images["store"], part("valkey"), "valkey-cli")
    _adopt_unpacked(docker, images["haproxy"], part("haproxy"))
    for service, user in (("grafana", "472:0"), ("jaeger", "10001")):
        docker.adopt(
            images[service], PYTHON, mounts=[f"{STANDINS / f'fake_{service}.py'}:/from"],
            inside="cp /from /fake.py; install -d -o 472 /var/lib/grafana",
            changes=[f"USER {user}", 'ENTRYPOINT ["python3", "/fake.py"]'],
        )  # fmt: skip


def _adopt_unpacked(docker: PrivateDocker, image: str, program: InstalledPart, *tools: str) -> None:
    """An image of a program that runs with the unpacked libraries of its own suite; they keep their paths. tools: of
    the same package as the program."""
    text = program.path.read_text()
    folders = sorted(set(re.findall(rf"{re.escape(str(cache_dir()))}/unpacked/[^/:\s]+", text)))
    entered = {str(parent) for folder in folders for parent in Path(folder).parents}
    own = program.path.name
    scripts = [f"cp /from /usr/local/bin/{own}"]
    for tool in tools:
        other = f's|--argv0 {own}|--argv0 {tool}|; s|/[^/ ]* "$@"|/{tool} "$@"|'
        scripts.append(f"sed '{other}' /from > /usr/local/bin/{tool}")
    copies = [f"mkdir -p {folder}; cp -a /unpacked/{Path(folder).name}/usr {folder}" for folder in folders]
    docker.adopt(
        image, PYTHON,
        mounts=[f"{program.path}:/from", f"{cache_dir() / 'unpacked'}:/unpacked"],
        inside="; ".join((*scripts, *copies, "chmod 755 /usr/local/bin/* " + " ".join(sorted(entered - {"/"})))),
    )  # fmt: skip


def _as_mounts(program: InstalledPart) -> list[str]:
    """The program, and beside Debian's Alertmanager the templates that the real image's binary has inside.

    The cache holds that one changed and behind a script, so that it runs where it lies; here it comes as Debian made
    it."""
    usr = program.path.parent.parent / "usr"
    debian, share = usr / "bin/prometheus-alertmanager", usr / "share/prometheus"
    if program.name == "alertmanager" and debian.exists():
        return [f"{debian}:/from", f"{share}:/share"]
    return [f"{program.path}:/from"]


def _recipe_files() -> list[Path]:
    return [
        Path(__file__),
        STANDINS / "private_docker.py",
        *(STANDINS / f"fake_{of}.py" for of in ("grafana", "jaeger")),
    ]


def _sources() -> Iterator[Path]:
    """What the Dockerfile can see, and how it is called."""
    yield from (ROOT / "Dockerfile", ROOT / ".dockerignore", ROOT / "Makefile")
    seen = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for top in (ROOT / name for name in sorted(seen)):
        files = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        yield from (path for path in files if "__pycache__" not in path.parts)


def _contents(files: Iterator[Path] | list[Path]) -> Iterator[str]:
    """Lines by which a file of any checkout is known."""
    digests = ((path, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)
    return (f"{path.relative_to(ROOT)} {digest} {path.stat().st_mode}" for path, digest in digests)


def _file_parts(files: list[Path]) -> Iterator[str]:
    return (f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)


def _hash(*parts: Iterator[str] | list[str]) -> str:
    return hashlib.sha256("\n".join(line for part in parts for line in part).encode()).hexdigest()

"""Several gateways: their figures are added up, and what is wrong between them is a note."""

from __future__ import annotations

import gzip
import http.server
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from exporters.catalogue import exposition_parser
from stack.cli.doctor import doctor_command
from stack.doctor.collect import evidence
from stack.doctor.evidence import Gauge, ModelEvidence
from stack.doctor.series import Pages, between
from tests.support.doctor_pages import without_waiting

ENGINE = Path(__file__).parents[2] / "situations" / "none-healthy"
POLICY = "0123456789abcdef"


def engine_page(when: str) -> str:
    return gzip.decompress((ENGINE / f"{when}.prom.gz").read_bytes()).decode()


def page(
    running: int = 3, slots: int = 8, policy: str = POLICY, lost: int | None = None, replicas: int | None = None
) -> str:
    lease = "" if lost is None else f"vllm_watch_gateway_lease_lost {lost}\n"
    lease += "" if replicas is None else f"vllm_watch_gateway_lease_replicas {replicas}\n"
    return (
        f'vllm_watch_gateway_running_requests{{team="chat",band="demo"}} {running}\n'
        f"vllm_watch_gateway_slots {slots}\nvllm_watch_gateway_slots_limit {slots}\n"
        f'vllm_watch_gateway_policy_info{{policy="{policy}"}} 1\n{lease}'
    )


def seen(*pages: str, lost: Mapping[str, str] | None = None) -> ModelEvidence:
    """What is known of an engine and of gateways g1:8010, g2:8010 ... with these pages."""
    sources = [Pages("e:8000", *(exposition_parser.parse(engine_page(when)) for when in ("before", "after")))]
    sources += [
        Pages(f"g{number}:8010", *[exposition_parser.parse(text)] * 2).of_gateway()
        for number, text in enumerate(pages, 1)
    ]
    (found,) = evidence(between(sources, 24, "", lost))
    return found


def test_figures_of_gateways_are_added_up():
    gate = seen(page(3, 8), page(4, 5)).gateway
    assert gate is not None
    assert (Gauge(7, 7, 7), Gauge(13, 13, 13)) == (gate.running, gate.slots_limit)
    assert {"chat": 7} == gate.teams, "a team is at both"


def test_gateways_that_agree_are_no_note():
    assert () == seen(page()).notes
    assert () == seen(page(lost=0, replicas=2), page(lost=0, replicas=2)).notes


@pytest.mark.parametrize(
    ("pages", "lost", "pattern"),
    [
        (
            (page(), page(policy="f" * 16)),
            {},
            rf"g1:8010: {POLICY}, g2:8010: f{{16}}\).*teams\.yaml.* VLLMGatewayNotSharing\)",
        ),
        ((page(lost=0), page(lost=1)), {}, r"g2:8010 had no lease .* VLLMGatewayNotSharing\)"),
        ((page(lost=0), page()), {}, r"g2:8010 shares no limits.* sharing\.store"),
        ((page(lost=0, replicas=3), page(lost=0, replicas=3)), {}, "3 gateways .* 2 were read"),
        (
            (page(), page()),
            {"g3:8010": "connection refused"},
            r"g3:8010 .*\(connection refused\); .* g1:8010 and g2:8010 .* VLLMGatewayReplicaDown\)",
        ),
    ],
    ids=("policies", "no lease", "no store", "too few", "down"),
)
def test_what_is_wrong_between_gateways_is_a_note(pages: tuple[str, ...], lost: Mapping[str, str], pattern: str):
    (note,) = seen(*pages, lost=lost).notes
    assert re.search(pattern, note)


# ---- by command


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Start a server that shows these pages, one after the other; a page None is a closed connection."""
    without_waiting(monkeypatch)
    servers = list[http.server.ThreadingHTTPServer]()

    def start(*pages: str | None) -> str:
        left = list(pages)

        class Shows(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/metrics":
                    body: str | None = '{"version":"0.32.0"}'
                else:
                    body = left.pop(0) if len(left) > 1 else left[0]
                if body is not None:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        servers.append(server := http.server.ThreadingHTTPServer(("127.0.0.1", 0), Shows))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(engine: str, *gateways: str) -> Result:
    arguments = [engine, "--for", "2s", *(word for url in gateways for word in ("--gateway", url))]
    return CliRunner().invoke(doctor_command, arguments, env={"COLUMNS": None})


def test_each_gateway_is_read_and_one_that_is_down_is_named(serving: Callable[..., str], free_port: Callable[[], int]):
    engine = serving(engine_page("before"), engine_page("after"))
    gateways = [serving(page()), serving(page(policy="f" * 16)), down := f"http://127.0.0.1:{free_port()}"]
    told = run(engine, *gateways)
    assert f"note: gateway {down.removeprefix('http://')} does not answer (" in told.output
    (note,) = re.findall("note: gateways .* VLLMGatewayNotSharing", told.output)
    assert {POLICY, "f" * 16} == set(re.findall("[0-9a-f]{16}", note))
    assert told.exit_code in (0, 1)


def test_a_gateway_that_goes_meanwhile_is_named(serving: Callable[..., str]):
    engine = serving(engine_page("before"), engine_page("after"))
    leaves = serving(page(), None)
    told = run(engine, serving(page()), leaves)
    assert f"note: gateway {leaves.removeprefix('http://')} does not answer (" in told.output


def test_without_any_gateway_that_answers_there_is_an_error(serving: Callable[..., str], free_port: Callable[[], int]):
    told = run(serving(engine_page("before"), engine_page("after")), *(f"http://127.0.0.1:{free_port()}" for _ in "ab"))
    assert (2, True) == (told.exit_code, "does not answer" in told.output)

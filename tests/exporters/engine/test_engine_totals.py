"""What an engine's page says in totals, core by core, and under which names it serves."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from exporters.catalogue.exposition_parser import BadExposition
from exporters.engine import view as engine_view
from exporters.engine.client import EngineClient, parse_models, served_names
from exporters.engine.view import EngineCore, EngineTotals

GOLDEN = Path(__file__).parents[2] / "golden"
ONE = ("tiny", "0")


@pytest.mark.parametrize(
    ("page", "finished", "worked_on", "running", "waiting"),
    [
        ("0.10.2-before", (0, 0, 0), (0, 0, 0), 0, 0),
        ("0.10.2-load-under-load", (25, 2161, 1872), (2950, 2190, 0), 4, 8),
        ("0.10.2-load-after-load", (70, 8048, 7272), (8284, 7306, 0), 0, 0),
        ("0.20.2-preempt-under-load", (49, 5267, 4551), (6081, 4839, 2368), 4, 8),
        ("0.20.2-after", (129, 10794, 21351), (11296, 21620, 4192), 0, 0),
        ("0.32.0-preempt-under-load", (87, 10002, 9384), (10856, 9851, 4224), 4, 1),
        ("0.32.0-preempt-after-load", (92, 10693, 9984), (10856, 10179, 4224), 0, 0),
        ("0.32.0-reject-after-load", (116, 13663, 11424), (13826, 11619, 5280), 0, 0),
    ],
)
def test_totals_of_captured_pages(page, finished, worked_on, running, waiting):
    """Finished is summed over reasons and steps at the end; what was worked on leads it, and stays ahead by what was
    aborted."""
    cores = engine_view.parse((GOLDEN / f"{page}.prom").read_text()).cores
    assert {ONE} == cores.keys()
    core = cores[ONE]
    assert (finished, worked_on, running, waiting) == (core.totals[:3], core.totals[3:6], core.running, core.waiting)


def test_request_times_are_sums_not_means():
    """Decode time is the sum over requests; the sum of mean times per token is a hundred times less."""
    totals = engine_view.parse((GOLDEN / "0.32.0-preempt-under-load.prom").read_text()).cores[ONE].totals
    assert pytest.approx((19.5660, 17.7930, 37.3590, 47.1105), abs=1e-4) == (
        totals.prefill_s,
        totals.decode_s,
        totals.inference_s,
        totals.e2e_s,
    )


def test_each_rank_and_model_has_own_totals():
    """Each rank and model has totals of its own and NaN is none."""
    text = (
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0\n'
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0\n'
        'vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 5.0\n'
        'vllm:request_prompt_tokens_sum{engine="1",model_name="m"} 50.0\n'
        'vllm:prompt_tokens_total{engine="1",model_name="m"} NaN\n'
        'vllm:num_requests_waiting{engine="1",model_name="m"} 2.0\n'
    )
    expected = {
        ("m", "0"): EngineCore(EngineTotals(requests=7), 0, 0),
        ("m", "1"): EngineCore(EngineTotals(requests=5, request_prompt_tokens=50), 0, 2),
    }
    assert expected == engine_view.parse(text).cores


def view(*totals: EngineTotals, started_s: float | None = 1.0) -> engine_view.EngineView:
    cores = {("m", str(rank)): EngineCore(each, 0, 0) for rank, each in enumerate(totals)}
    return engine_view.EngineView(None, started_s, {}, (), cores=cores)


def test_growth_per_core_restarts_from_0():
    """Growth is taken core by core and counts from 0 after a restart."""
    before, after = view(EngineTotals(10), EngineTotals(20)), view(EngineTotals(13), EngineTotals(24))
    assert {"m": EngineTotals(7)} == engine_view.growth(before, after)
    assert {"m": EngineTotals(5)} == engine_view.growth(before, view(EngineTotals(2), EngineTotals(3), started_s=9.0))
    assert {"m": EngineTotals(23)} == engine_view.growth(
        view(EngineTotals(10), EngineTotals(20), started_s=None),
        view(EngineTotals(2), EngineTotals(21), started_s=None),
    )


def test_fallen_total_is_a_restart_without_start_time():
    """A total that fell is a restart where the page has no start."""
    assert engine_view.restarted(view(EngineTotals(10, 5), started_s=None), view(EngineTotals(10, 4), started_s=None))
    assert not engine_view.restarted(view(EngineTotals(10), started_s=None), view(EngineTotals(11), started_s=None))


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (
            '{"data":[{"id":"base","root":"/m","parent":null},{"id":"chat","root":"/m"}]}',
            {"base": "base", "chat": "base"},
        ),
        (
            '{"data":[{"id":"base","root":"/m"},{"id":"fr","root":"/lora/fr","parent":"base"}]}',
            {"base": "base", "fr": "base"},
        ),
        (
            '{"data":[{"id":"a","root":"/m"},{"id":"b","root":"/m"},{"id":"fr","parent":"b"}]}',
            {"a": "a", "b": "a", "fr": "a"},
        ),
        ('{"data":[{"id":"fr","parent":"gone"}]}', {"fr": "gone"}),
        ('{"data":[]}', {}),
        ('{"data":[{"id":"m","max_model_len":"long"}]}', {"m": "m"}),
    ],
)
def test_names_lead_to_the_first_name_served(answer, names):
    """The engine's series carry the first of its served names, whatever a request asked for."""
    assert names == served_names(parse_models(answer.encode()))


@pytest.mark.parametrize("answer", ['{"error":"unauthorized"}', '{"data":[{"id":7}]}', "<html>", "[" * 100_000])
def test_no_list_of_models_is_refused(answer):
    with pytest.raises(BadExposition, match="list of models"):
        parse_models(answer.encode())


async def test_names_are_read_from_the_server():
    """Names are read from the server and their absence costs nothing."""
    answers = iter([(200, b'{"data":[{"id":"m","root":"/m"}]}'), (401, b"{}"), (200, b"\xff")])

    async def models(_: web.Request) -> web.Response:
        status, body = next(answers)
        return web.Response(status=status, body=body)

    app = web.Application()
    app.add_routes([web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as session:
        assert {"m": "m"} == await EngineClient(session, url, 2.0).served_names()
        assert await EngineClient(session, url, 2.0).served_names() is None
        assert await EngineClient(session, url, 2.0).served_names() is None
        await runner.cleanup()
        assert await EngineClient(session, url, 2.0).served_names() is None

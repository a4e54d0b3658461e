"""Random histories of a request log and the sidecar that reads it: writing, rotation, cuts, dying disks and SIGKILLs
against a plain model.

VLLM_WATCH_HISTORIES=10000 python -m pytest tests/exporters/test_sidecar_histories.py    for more of them; `make
bench-faults` runs as many."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from exporters import ingest as logs_module
from exporters.requests import log_reader as log_reader_module
from exporters.requests import positions as positions_module
from exporters.requests import tail as tail_module
from tests.support.log_histories import SMALL, Histories

HISTORIES = int(os.environ.get("VLLM_WATCH_HISTORIES", "100"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(positions_module, name, value)
    monkeypatch.setattr(logs_module, "BATCH_BYTES", 4 << 20)
    for module in (tail_module, log_reader_module):
        monkeypatch.setattr(module, "LOGGED_AT_MOST", 0)


@pytest.mark.usefixtures("small")
def test_archives_that_begin_with_a_hole_are_all_read() -> None:
    """Found by random histories: nothing but its hole was known, and that is like any other."""
    state = Histories()
    state.start(appends=False)

    def write() -> None:
        state.write(also="", pads=[0], then="", torn=0)

    state.kill()
    state.commit(meanwhile=True)
    write()
    state.commit()
    state.lose(kind="cut to nothing", share=0.05)
    write()
    state.copytruncate(looks=["at a part"])
    write()
    state.copytruncate(looks=[])
    state.compress(looks=[], number=1)
    state.teardown()


@pytest.mark.usefixtures("small")
def test_random_histories_are_counted_exactly_once() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=HISTORIES,
            stateful_step_count=40,
            deadline=None,
            # `make bench-faults` looks for new ones, `make test` for what came back
            derandomize="VLLM_WATCH_HISTORIES" not in os.environ,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )

"""Every case of the fault table is counted exactly, by the sidecar as it runs, and told on its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporters.catalogue import sidecar as sidecar_series
from stack.lab.install import InstalledPart
from tests.support.fault_table import (
    CASES,
    Case,
    Figures,
    Log,
    Mtail,
    Sidecar,
    cut_with_unread_lines,
    disk_full,
    half_a_line,
    run,
    values_on,
)
from tests.support.wait import eventually

EXTRA = ("full-and-killed", "removed")


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """One process for all cases; each has a log and a team of its own."""
    reader = Sidecar(tmp_path_factory.mktemp("faults"), [*(case.team for case in CASES), *EXTRA])
    yield reader
    reader.close()


def told(page: str, log: Log) -> dict[str, dict[str, int]]:
    """What a page says of a log besides its counts: what is 0 is left out. Bad lines and duplicates are those of all
    logs."""
    values = values_on(page)

    def by_reason(prefix: str) -> dict[str, int]:
        found = {
            name.removeprefix(prefix).removesuffix('"}'): int(value)
            for name, value in values.items()
            if name.startswith(prefix)
        }
        return {reason: count for reason, count in found.items() if count}

    return {
        "faults": by_reason(f'{sidecar_series.LOG_FAULTS.name}{{path="{log.path}",reason="'),
        "bad": by_reason(f'{sidecar_series.LOG_BAD_LINES.name}{{reason="'),
        "duplicates": by_reason(f'{sidecar_series.LOG_DUPLICATES.name}{{path="{log.path}'),
    }


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {reason: count - before.get(reason, 0) for reason, count in after.items() if count > before.get(reason, 0)}


def check(case: Case, sidecar: Sidecar) -> Log:
    """The counts are exact, and the page says what happened and no more."""
    log = Log(sidecar.root / case.team)
    sidecar.start(log)
    before = told(sidecar.page(), log)
    found = run(case, sidecar, log)
    assert log.truth == found

    def is_told() -> bool:
        after = told(sidecar.page(), log)
        more = {kind: grown(before[kind], after[kind]) for kind in before}
        expected = {
            "faults": dict(case.faults),
            "bad": dict(case.bad),
            "duplicates": {"": case.duplicates} if case.duplicates else {},
        }
        assert expected == more
        return True

    eventually(is_told, what="what the page says of it")
    return log


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.act is not disk_full], ids=lambda case: f"{case.number} {case.title}"
)
def test_a_case_is_counted_exactly_and_told(case: Case, sidecar: Sidecar):
    check(case, sidecar)


def test_full_disk_holds_the_page_then_advances_once(sidecar: Sidecar):
    """Case 15. A scrape that sees counts which are not safe would see them twice after a crash."""
    with sidecar.watched() as pages:
        log = check(next(case for case in CASES if case.act is disk_full), sidecar)
    requests = f'{sidecar_series.REQUESTS.name}{{model_name="m",outcome="ok",team="{log.team}"}}'
    counts = [int(values.get(requests, 0)) for values in pages]
    assert [0, 20, 60] == sorted(set(counts))
    assert counts == sorted(counts)
    up = [values[sidecar_series.CHECKPOINT_UP.name] for values in pages]
    assert {20} == {count for count, is_up in zip(counts, up, strict=True) if not is_up}, (
        "not one count moves while it is down"
    )
    assert 1 == up[-1]
    assert (
        pages[-1][f'{sidecar_series.SOURCE_ERRORS.name}{{kind="checkpoint",reason="os",source="{sidecar.state}"}}'] >= 2
    )


def test_a_sigkill_while_the_disk_is_full_costs_nothing(sidecar: Sidecar):
    log = Log(sidecar.root / EXTRA[0])
    sidecar.start(log)
    log.add(10)
    sidecar.settle(log)
    sidecar.fill_disk(40)
    log.add(10)
    log.rotate()
    log.add(10)
    eventually(
        lambda: not values_on(sidecar.page())[sidecar_series.CHECKPOINT_UP.name], what="the failing of the state"
    )
    sidecar.kill()
    sidecar.start(log)
    found = sidecar.settle(log)
    assert log.truth == found


def test_removed_state_is_written_anew(sidecar: Sidecar):
    """A state that is removed under the sidecar is written anew."""
    log = Log(sidecar.root / EXTRA[1])
    sidecar.start(log)
    log.add(10)
    sidecar.settle(log)
    sidecar.state.unlink()
    log.add(10)
    eventually(sidecar.state.exists, what="a new file")
    log.rotate()
    log.add(10)
    sidecar.settle(log)
    sidecar.kill()
    sidecar.start(log)
    found = sidecar.settle(log)
    assert log.truth == found


def test_nothing_comes_later_and_no_counter_ever_fell(sidecar: Sidecar):
    """After a clean restart every case still has its counts, and no scrape of the whole run saw a counter lower than
    the one before."""
    if not sidecar.logs:  # this test alone
        run(CASES[0], sidecar, Log(sidecar.root / CASES[0].team))
    first, *_ = sidecar.logs.values()
    truth = {team: log.truth for team, log in sidecar.logs.items()}
    sidecar.start(first)
    for restart in (True, False):
        page = sidecar.page()
        assert truth == {team: Figures.on_page(page, team) for team in truth}
        if restart:
            sidecar.stop()
            sidecar.start(first)
    assert {} == sidecar.fell
    eventually(lambda: sidecar.scrapes > 10)


@pytest.mark.parametrize(
    ("act", "loses"), [(half_a_line, 0), (cut_with_unread_lines, 20)], ids=["loses nothing", "loses"]
)
def test_the_harness_finds_what_another_reader_loses(act, loses, part: Callable[[str], InstalledPart], tmp_path: Path):
    reader, log = Mtail(tmp_path, part("mtail").path), Log(tmp_path / "log")
    try:
        run(next(case for case in CASES if case.act is act), reader, log)
        assert loses == len(set(log.ids) - set(reader.ids()))
    finally:
        reader.stop()

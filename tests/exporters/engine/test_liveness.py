"""Liveness of an engine: the state machine over replays of measured situations and over random evidence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.engine.liveness import DEFAULT_LIMITS, Cause, Endpoint, EngineState, Evidence, Liveness, StepValues
from exporters.engine.page_values import step_values

GOLDEN = Path(__file__).parents[2] / "golden"


@dataclass
class Watch:
    """A gateway that looks once a second, sends a probe when the machine wants one, and waits for its answer."""

    probes: bool = True
    answers_probe: bool = True
    at: float = 100.0
    probe: float | None = None
    last_probe: float = 100.0
    answered: int = 0
    liveness: Liveness = field(default_factory=lambda: Liveness.unknown(100.0))
    states: list[tuple[float, EngineState, Cause]] = field(default_factory=list)
    out_after: float | None = None
    hung_after: float | None = None

    def look(self, seconds: float = 1.0, **more: object) -> None:
        self.at += seconds
        if self.probe is not None and self.answers_probe:
            self.answered, self.probe = self.answered + 1, None
        evidence = Evidence(self.at, probes=self.probes, probe_since=self.probe, probe_answers=self.answered)
        self.liveness = self.liveness.after(replace(evidence, **more))
        self.states.append((self.at, self.liveness.state, self.liveness.cause))
        if self.probes and self.probe is None and self.liveness.wants_probe(self.at, self.last_probe):
            self.probe = self.last_probe = self.at

    def hold(self, seconds: int, **same: object) -> None:
        """Look for so long while nothing changes; note when the engine left rotation and when it counts as hung."""
        began = self.at
        self.out_after = self.hung_after = None
        for _ in range(seconds):
            self.look(**same)
            if self.out_after is None and not self.liveness.in_rotation:
                self.out_after = self.at - began
            if self.hung_after is None and self.liveness.state is EngineState.HUNG:
                self.hung_after = self.at - began

    def seen(self) -> set[EngineState]:
        return {state for _, state, _ in self.states}


def steps(count: int, running: float = 0.0, waiting: float = 0.0, **more: float) -> StepValues:
    return StepValues((str(count).encode(),), running, waiting, **more)


def working(watch: Watch, seconds: int = 5) -> None:
    for second in range(seconds):
        watch.look(steps=steps(second, 2), requests=2, outputs=second)


def test_stopped_core_leaves_rotation_then_is_hung():
    """Requests run, every value of /metrics and every stream stands still, the probe is not answered."""
    watch = Watch(answers_probe=False)
    working(watch)
    watch.hold(60, steps=steps(4, 2), requests=2, outputs=4)
    assert (10.0, 30.0) == (watch.out_after, watch.hung_after)
    assert (EngineState.HUNG, Cause.STEPS_STOPPED) == (watch.liveness.state, watch.liveness.cause)


def test_stopped_core_whose_gauges_read_0_is_found():
    """Published failure: num_requests_running read 0 during the hang, so a rule on running > 0 stayed silent."""
    watch = Watch(answers_probe=False)
    working(watch)
    watch.look(steps=steps(5, 0), requests=2, outputs=4)
    watch.hold(60, steps=steps(5, 0), requests=2, outputs=4)
    assert watch.out_after is not None
    assert watch.out_after <= 12
    assert (EngineState.HUNG, Cause.OUTPUT_STOPPED) == (watch.liveness.state, watch.liveness.cause)


def test_core_that_stops_while_idle_is_found_by_the_probe():
    watch = Watch()
    watch.hold(20, steps=steps(5))
    assert watch.liveness.state in (EngineState.IDLE, EngineState.HEALTHY)
    watch.answers_probe = False
    watch.hold(60, steps=steps(5))
    assert watch.out_after is not None
    assert watch.out_after <= 15
    assert (EngineState.HUNG, Cause.PROBE_SILENT) == (watch.liveness.state, watch.liveness.cause)


def test_stopped_api_server_needs_no_probe():
    watch = Watch(answers_probe=False)
    working(watch)
    watch.hold(60, endpoint=Endpoint.SILENT, requests=2, outputs=4)
    assert (10.0, 30.0) == (watch.out_after, watch.hung_after)
    assert Cause.API_SILENT is watch.liveness.cause


@pytest.mark.parametrize("silence", [{"endpoint": Endpoint.SILENT}, {"steps": steps(9, 2)}, {"steps": steps(9, 0)}])
@pytest.mark.parametrize(("busy_s", "most"), [(40.0, 40.0), (9e9, DEFAULT_LIMITS.planned_s)])
def test_busy_engine_is_hung_only_after_its_work(silence: dict[str, object], busy_s: float, most: float):
    """What it was sent explains the silence for its time and no longer, and never for more than planned work."""
    watch = Watch(answers_probe=False)
    working(watch)
    if "steps" in silence:
        watch.look(requests=2, outputs=4, **silence)
    watch.hold(700, requests=2, outputs=4, busy_s=busy_s, **silence)
    assert (most + 10, most + 30) == (watch.out_after, watch.hung_after)
    assert (EngineState.SLOW, Cause.BUSY) in {each[1:] for each in watch.states}


def test_engine_is_back_after_two_signs_of_progress():
    watch = Watch(answers_probe=False)
    working(watch)
    watch.hold(40, steps=steps(4, 2), requests=2, outputs=4)
    watch.answers_probe = True
    watch.look(steps=steps(9, 2), requests=2, outputs=40)
    assert (EngineState.SUSPECT, Cause.RECOVERING) == (watch.liveness.state, watch.liveness.cause)
    assert not watch.liveness.in_rotation
    watch.look(steps=steps(19, 2), requests=2, outputs=80)
    assert EngineState.HEALTHY is watch.liveness.state
    assert watch.liveness.in_rotation


def test_chunked_prefill_without_outputs_is_not_suspect():
    """Published failure: steps with outputs stand still for 31 s in a chunked prefill; cache usage moves each 3 s."""
    watch = Watch(answers_probe=False)
    working(watch)
    for second in range(120):
        cache = StepValues((b"258", str(second // 3).encode()), running=1, waiting=1)
        watch.look(steps=cache, requests=2, outputs=4, silent_s=second, prefill_tokens=100_000)
    assert watch.seen() <= {EngineState.HEALTHY, EngineState.SLOW}
    assert watch.liveness.in_rotation


def test_prefill_of_100000_tokens_in_one_step_is_not_hung():
    """Nothing moves until the step ends: the engine leaves rotation, and no restart is asked for."""
    watch = Watch(answers_probe=False)
    working(watch)
    watch.hold(120, steps=steps(4, 1), requests=1, outputs=4, prefill_tokens=100_000)
    assert (11.0, None) == (watch.out_after, watch.hung_after)


@pytest.mark.parametrize(
    "same",
    [
        {"steps": steps(4, 2, asleep=True)},
        {"steps": steps(4, 0, 2), "paused": True},
        {"endpoint": Endpoint.REFUSED},
        {"endpoint": Endpoint.SCALING},
        {"endpoint": Endpoint.RETIRED},
        {"steps": steps(0, 1, produced=False)},
        {"steps": steps(4, 1), "planned": True},
    ],
    ids=["sleep", "pause", "start-up", "scaling", "retired rank", "compilation", "adapter load"],
)
def test_planned_work_is_never_hung(same):
    watch = Watch(answers_probe=False)
    working(watch)
    watch.hold(300, requests=2, outputs=4, **same)
    assert EngineState.HUNG not in watch.seen()


def test_pause_of_three_seconds_keeps_the_engine_in_rotation():
    watch = Watch(answers_probe=False)
    working(watch)
    for second in range(60):
        watch.look(steps=steps(4 + second // 4, 2), requests=2, outputs=4 + second // 4)
        assert watch.liveness.in_rotation
    assert watch.seen() <= {EngineState.HEALTHY, EngineState.SLOW}


def test_overload_is_not_hung():
    """16 of 500 clients are served and the probe waits behind them: values move."""
    watch = Watch(answers_probe=False)
    for second in range(120):
        watch.look(steps=steps(second, 16, 484), requests=500, outputs=0, silent_s=second)
    assert {EngineState.HEALTHY} == watch.seen()


def test_lost_requests_are_slow_and_stay_in_rotation():
    watch = Watch()
    working(watch)
    for second in range(100):
        watch.look(steps=steps(4, 0), requests=2, outputs=4, silent_s=second)
    assert Cause.REQUESTS_LOST in {cause for _, _, cause in watch.states}
    assert watch.liveness.in_rotation
    assert EngineState.HUNG not in watch.seen()


def test_decode_engine_is_not_blamed_for_its_prefill_engine():
    for probes in (True, False):
        watch = Watch(probes=probes)
        working(watch)
        watch.look(steps=steps(4, 0, 1), requests=1, outputs=4)
        watch.hold(120, steps=steps(4, 0, 1), requests=0 if not probes else 1, outputs=4, silent_s=20)
        assert watch.out_after is None
        assert watch.hung_after is None


@pytest.mark.parametrize("probes", [True, False])
def test_engine_that_only_fetches_kv_is_slow_for_that_reason(probes):
    """Published blind spot: the prefill engine stopped, and every value of the decode engine stood still for 20 s."""
    watch = Watch(probes=probes)
    working(watch)
    watch.look(steps=steps(4, 0, 2, fetching=2), requests=2, outputs=4)
    watch.states.clear()
    watch.hold(600, steps=steps(4, 0, 2, fetching=2), requests=2, outputs=4, silent_s=20)
    assert (None, None) == (watch.out_after, watch.hung_after)
    assert Cause.KV_FETCH in {cause for _, _, cause in watch.states}
    assert watch.seen() <= {EngineState.SLOW, EngineState.HEALTHY}


def test_engine_that_hangs_while_it_fetches_is_found_by_a_probe():
    watch = Watch(answers_probe=False)
    working(watch)
    watch.look(steps=steps(4, 0, 1, fetching=1), requests=1, outputs=4)
    watch.hold(60, steps=steps(4, 0, 1, fetching=1), requests=1, outputs=4)
    assert watch.out_after is not None
    assert watch.out_after <= 15
    assert (EngineState.HUNG, Cause.PROBE_SILENT) == (watch.liveness.state, watch.liveness.cause)


@pytest.mark.parametrize(
    "same",
    [
        {"steps": steps(4, 1, 1, fetching=1), "requests": 2},
        {"steps": steps(4, 0, 2, fetching=1), "requests": 2},
        {"steps": steps(4, 0, 1, fetching=1), "requests": 2},
    ],
    ids=["another runs", "another waits", "another is not known to it"],
)
def test_fetch_of_one_request_excuses_no_other(same):
    watch = Watch(answers_probe=False)
    working(watch)
    watch.look(outputs=4, **same)
    watch.hold(60, outputs=4, **same)
    assert watch.out_after is not None
    assert watch.out_after <= 12
    assert EngineState.HUNG is watch.liveness.state


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 60)), max_size=8), st.booleans())
def test_no_engine_that_answers_its_probe_is_blamed_for_a_fetch(stream, probes):
    """Requests may come and go: while all that wait are fetched, the engine stays in rotation, with probes and
    without."""
    watch = Watch(probes=probes)
    for waiting, more, seconds in stream:
        for _ in range(seconds):
            watch.look(steps=steps(4, 0, waiting, fetching=waiting + more), requests=waiting, silent_s=20)
            assert watch.liveness.in_rotation
            assert watch.liveness.state in (EngineState.SLOW, EngineState.HEALTHY, EngineState.IDLE)


@pytest.mark.parametrize("gap_s", [4.0, 30.0, 600.0])
def test_silence_that_a_late_observer_saw_counts_for_nothing(gap_s):
    """A gateway under CPU starvation, a stopped scraper, a suspended machine."""
    watch = Watch(answers_probe=False)
    working(watch)
    for _ in range(40):
        watch.look(gap_s, steps=steps(4, 2), requests=2, outputs=4)
        assert watch.liveness.in_rotation
    assert Cause.OBSERVER_LATE is watch.liveness.cause
    assert EngineState.HUNG not in watch.seen()


def test_one_late_look_takes_only_its_own_time_from_a_silence():
    watch = Watch(answers_probe=False)
    working(watch)
    watch.hold(20, steps=steps(4, 2), requests=2, outputs=4)
    watch.look(6.0, steps=steps(4, 2), requests=2, outputs=4)
    assert Cause.OBSERVER_LATE is watch.liveness.cause
    watch.hold(20, steps=steps(4, 2), requests=2, outputs=4)
    assert 10.0 == watch.hung_after


def test_output_proves_progress_where_metrics_are_silent():
    watch = Watch()
    for second in range(60):
        watch.look(endpoint=Endpoint.SILENT, requests=1, outputs=second)
    assert {EngineState.HEALTHY} == watch.seen() - {EngineState.SUSPECT, EngineState.SLOW}
    assert EngineState.HEALTHY is watch.liveness.state


def test_without_probes_a_sidecar_needs_45_s():
    watch = Watch(probes=False)
    working(watch)
    watch.hold(60, steps=steps(4, 2), outputs=4)
    assert 45.0 == watch.hung_after
    watch.look(steps=steps(5, 2), outputs=4)
    assert EngineState.HEALTHY is watch.liveness.state


_looks = st.fixed_dictionaries(
    {
        "endpoint": st.sampled_from(Endpoint),
        "count": st.integers(0, 3),
        "running": st.sampled_from([0.0, 2.0]),
        "waiting": st.sampled_from([0.0, 1.0]),
        "fetching": st.sampled_from([0.0, 1.0]),
        "produced": st.booleans(),
        "asleep": st.sampled_from([False, False, False, True]),
        "requests": st.integers(0, 2),
        "output": st.sampled_from([0, 0, 0, 1]),
        "paused": st.sampled_from([False, False, False, True]),
        "planned": st.sampled_from([False, False, False, True]),
        "gap": st.sampled_from([1.0, 1.0, 1.0, 2.0, 5.0]),
        "repeat": st.integers(1, 40),
        "answers": st.booleans(),
    }
)


@given(st.lists(_looks, max_size=12), st.booleans())
def test_every_state_has_its_cause_over_random_evidence(stream, probes):
    """Hung needs the whole time without any sign, and every state has a cause of its own."""
    allowed = {
        EngineState.HEALTHY: {Cause.STEPS, Cause.OUTPUT, Cause.PROBE, Cause.WORK},
        EngineState.IDLE: {Cause.UNREAD, Cause.NO_WORK},
        EngineState.LOADING: {Cause.REFUSED},
        EngineState.DRAINING: {Cause.ASLEEP, Cause.PAUSED},
        EngineState.SCALING: {Cause.ELASTIC_EP, Cause.RETIRED_RANK},
    }
    silent = {Cause.STEPS_STOPPED, Cause.OUTPUT_STOPPED, Cause.PROBE_SILENT, Cause.API_SILENT}
    allowed |= {
        EngineState.SLOW: silent | {Cause.REQUESTS_LOST, Cause.KV_FETCH},
        EngineState.SUSPECT: silent | {Cause.RECOVERING},
        EngineState.HUNG: silent,
    }
    watch, outputs, moved_at = Watch(probes=probes), 0, 100.0
    for one in stream:
        watch.answers_probe = one["answers"]
        for _ in range(one["repeat"]):
            before, answered = watch.liveness, watch.answered
            outputs += one["output"]
            more = {name: one[name] for name in ("fetching", "produced", "asleep")}
            shown = steps(one["count"], one["running"], one["waiting"], **more)
            watch.look(
                one["gap"],
                endpoint=one["endpoint"],
                steps=shown,
                requests=one["requests"],
                outputs=outputs,
                paused=one["paused"],
                planned=one["planned"],
            )
            after = watch.liveness
            assert after.cause in allowed[after.state] | {Cause.OBSERVER_LATE}
            if one["output"] or watch.answered > answered:
                moved_at = watch.at
                assert after.state in (EngineState.HEALTHY, EngineState.IDLE, EngineState.SLOW, EngineState.SUSPECT)
            if after.state is EngineState.HUNG and before.state is not EngineState.HUNG:
                assert watch.at - moved_at >= DEFAULT_LIMITS.hung_s
                assert one["gap"] <= DEFAULT_LIMITS.gap_s
                assert not one["planned"] or after.quiet_s() >= DEFAULT_LIMITS.planned_s
            assert after.in_rotation or not after.out or after.state in (EngineState.SUSPECT, EngineState.HUNG)
            assert not (after.state is EngineState.HUNG and after.in_rotation)


@pytest.mark.parametrize("release", ["0.10.2-load", "0.20.2-preempt", "0.32.0-preempt"])
def test_steps_are_read_from_every_release(release):
    before = step_values((GOLDEN / f"{release}-under-load.prom").read_bytes())
    name = (
        f"{release}-after-load.prom"
        if (GOLDEN / f"{release}-after-load.prom").exists()
        else f"{release[:6]}-after.prom"
    )
    after = step_values((GOLDEN / name).read_bytes())
    assert before is not None
    assert after is not None
    assert before != after
    assert (4.0, True, False, 0.0) == (before.running, before.produced, before.asleep, after.running)
    assert len(before.counters) >= 10


def test_a_page_of_another_server_has_no_steps():
    assert step_values(b"up 1\n") is None
    assert step_values(b'vllm:num_requests_running{engine="0"} x\n') is None


@pytest.mark.parametrize(
    ("in_progress", "to_start", "completed", "fetching"), [(1, 2, 0, 3.0), (0, 2, 0, 0.0), (0, 0, 2, 0.0)]
)
def test_requests_that_are_fetched_are_read_from_their_gauge(in_progress, to_start, completed, fetching):
    """Only while one is in progress do those to start wait for another engine."""
    page = f"""\
vllm:num_requests_running{{engine="0",model_name="tiny"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} 3.0
vllm:num_requests_kv_fetch_by_stage{{engine="0",model_name="tiny",stage="waiting_to_start"}} {to_start}.0
vllm:num_requests_kv_fetch_by_stage{{engine="0",model_name="tiny",stage="in_progress"}} {in_progress}.0
vllm:num_requests_kv_fetch_by_stage{{engine="0",model_name="tiny",stage="completed_waiting"}} {completed}.0
"""
    read = step_values(page.encode())
    assert read is not None
    assert fetching == read.fetching


def test_sleep_is_read_from_its_gauge():
    page = (GOLDEN / "0.32.0-after-probe.prom").read_text()
    awake = 'sleep_state="awake"} 1.0'
    assert awake in page
    asleep = step_values(page.replace(awake, awake.replace("1.0", "0.0")).encode())
    assert asleep is not None
    assert asleep.asleep

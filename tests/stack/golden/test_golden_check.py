"""Record and check over HTTP, against a fake engine: every cause by name, bad input, probes in the log."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from pathlib import Path

import msgspec
import pytest

from exporters.engine.golden_state import GoldenCause, GoldenResult, GoldenVerdict
from exporters.requests.read import read_records
from exporters.requests.record import PROBE_TEAM
from stack.golden import baseline as baselines
from stack.golden.baseline import Baseline, GoldenError
from stack.golden.check import check_engine
from stack.golden.client import CHAT
from stack.golden.prompts import PromptSet, TextPrompt
from stack.golden.record import RecordPlan, record
from tests.support.scoring_engine import ScoringEngine

PROMPTS = PromptSet(
    prompts=(
        TextPrompt("one", "the quick brown fox jumps over the lazy dog"),
        TextPrompt("two", "3.14159 and 2.71828 are numbers"),
    )
)
PLAN = RecordPlan(prompts=PROMPTS, runs=12)


def recorded(engine: ScoringEngine, plan: RecordPlan = PLAN, **more: object) -> Baseline:
    async def run() -> Baseline:
        async with engine.running() as url:
            return await record(url, plan, **more)  # type: ignore[arg-type]

    return asyncio.run(run())


def checked(engine: ScoringEngine, baseline: Baseline, times: int = 1, **more: object) -> GoldenResult:
    async def run() -> GoldenResult:
        async with engine.running() as url:
            results = [await check_engine(url, baseline, **more) for _ in range(times)]  # type: ignore[arg-type]
            return results[-1]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return recorded(ScoringEngine())


def noisy(seed: int, size: float = 0.01) -> ScoringEngine:
    """An engine whose numbers differ from run to run, by another amount for each token."""
    rng = random.Random(seed)
    return ScoringEngine(shift=lambda ids, place: rng.gauss(0, size * (1 + place % 5)))


def test_unchanged_engine_is_the_same_after_one_run(baseline):
    engine = ScoringEngine()
    found = checked(engine, baseline)
    assert (GoldenVerdict.SAME, GoldenCause.NONE, 0.0) == (found.verdict, found.cause, found.max_abs)
    assert 0 < found.tokens == sum(len(engine._ids(body)) + body["max_tokens"] for body in engine.bodies)
    assert 1 == engine.most_scores, "one request with log-probabilities at a time"
    assert found.tokens <= baseline.tokens + 200


DAMAGE = {
    GoldenCause.TOKENIZER: ScoringEngine(letter=lambda letter: ord(letter) + (letter == "q")),
    GoldenCause.TEMPLATE: ScoringEngine(template="<user> {}<assistant>"),
    GoldenCause.NOT_FINITE: ScoringEngine(nan="400"),
    GoldenCause.REPETITION: ScoringEngine(stuck=True),
    GoldenCause.DTYPE: ScoringEngine(grid=2**-10),
    GoldenCause.NUMERIC: ScoringEngine(shift=lambda ids, place: -1e-6 if place == 20 else 0.0),
    GoldenCause.MODEL: ScoringEngine(root="models/other", shift=lambda ids, place: -0.5),
}


@pytest.mark.parametrize("cause", DAMAGE)
def test_damage_is_found_and_named(baseline, cause):
    found = checked(DAMAGE[cause], baseline)
    assert (GoldenVerdict.WRONG, cause) == (found.verdict, found.cause), found.sentence


@pytest.mark.parametrize(("bos", "place"), [((), "without"), ((1, 1), "in front")])
def test_begin_of_text_is_named(baseline, bos, place):
    found = checked(ScoringEngine(bos=bos), baseline)
    assert GoldenCause.TOKENIZER is found.cause
    assert re.match(rf"2 of 2 .*; one: .*\b{place}\b", found.sentence)


def test_other_release_with_small_difference_is_different(baseline):
    engine = ScoringEngine(version="0.33.0", shift=lambda ids, place: -0.001)
    found = checked(engine, baseline)
    assert (GoldenVerdict.DIFFERENT, GoldenCause.RELEASE) == (found.verdict, found.cause)
    assert "0.33.0 instead of 0.32.0" in found.sentence
    assert found.max_abs == pytest.approx(0.001)
    engine.shift = lambda ids, place: -0.2
    assert GoldenVerdict.WRONG is checked(engine, baseline).verdict


def test_dtype_of_the_development_mode_is_named():
    known = recorded(ScoringEngine(dtype="bfloat16"))
    found = checked(ScoringEngine(dtype="float16", shift=lambda ids, place: -1e-4), known)
    assert (GoldenCause.DTYPE, True) == (found.cause, "float16 instead of bfloat16" in found.sentence)


def test_only_first_difference_is_reported(baseline):
    found = checked(DAMAGE[GoldenCause.NUMERIC], baseline)
    assert "one, prompt token 20" == found.first
    assert found.max_abs == pytest.approx(1e-6)


def test_noise_of_batches_is_no_alarm_and_damage_is():
    known = recorded(noisy(1), dataclasses.replace(PLAN, runs=24))
    assert known.limits.least_sd > 0
    engine = noisy(2)
    assert GoldenCause.NOISE is checked(engine, known).cause
    rng = random.Random(3)
    engine.shift = lambda ids, place: rng.gauss(-0.4 if place == 11 else 0.0, 0.01 * (1 + place % 5))
    found = checked(engine, known)
    assert (GoldenVerdict.WRONG, GoldenCause.NUMERIC) == (found.verdict, found.cause), found.sentence


def test_fault_that_comes_and_goes_is_found(baseline):
    """One run of four has every bit of the record, the others do not."""
    engine, calls = ScoringEngine(), [0]

    def shift(ids: tuple[int, ...], place: int) -> float:
        calls[0] += place == 1
        return -0.1 if calls[0] % 8 in (1, 2, 3, 4, 5, 6) else 0.0

    engine.shift = shift
    assert GoldenCause.NUMERIC is checked(engine, baseline).cause


def test_engine_without_its_former_chat_is_named(baseline):
    found = checked(ScoringEngine(chat=False, tokenize=False), baseline)
    assert (GoldenCause.TEMPLATE, True) == (found.cause, "no chat template" in found.sentence)


# ---- what engines offer


@pytest.mark.parametrize(
    "offered",
    [{"token_ids": False}, {"tokenize": False}, {"max_logprobs": 0}, {"chat": False, "tokenize": False}],
    ids=str,
)
def test_engines_that_offer_less_are_checked(offered):
    known = recorded(ScoringEngine(**offered))
    assert GoldenVerdict.SAME is checked(ScoringEngine(**offered), known).verdict
    broken = ScoringEngine(**offered, shift=lambda ids, place: -0.1)
    assert GoldenCause.NUMERIC is checked(broken, known).cause


def test_chat_route_is_enough():
    offered = {"completions": False}
    known = recorded(ScoringEngine(**offered))
    assert CHAT == known.route
    assert GoldenVerdict.SAME is checked(ScoringEngine(**offered), known).verdict
    assert GoldenCause.TEMPLATE is checked(ScoringEngine(**offered, template="[{}]"), known).cause
    assert GoldenCause.NUMERIC is checked(ScoringEngine(**offered, shift=lambda ids, place: -0.1), known).cause
    assert GoldenCause.NOT_FINITE is checked(ScoringEngine(**offered, nan="400"), known).cause


@pytest.mark.parametrize("nan", ["500", "null"])
def test_nan_is_named_however_it_is_answered(baseline, nan):
    """500: an exception while the answer is written, which releases without the check of 0.32 let through."""
    assert GoldenCause.NOT_FINITE is checked(ScoringEngine(nan=nan), baseline).cause


# ---- mistakes


def said(work: object) -> str:
    with pytest.raises(GoldenError) as found:
        work()  # type: ignore[operator]
    assert "\n" not in str(found.value)
    return str(found.value)


def test_every_mistake_is_one_sentence(baseline, tmp_path):
    assert re.fullmatch(
        r"http://127\.0\.0\.1:\d+ .*tiny", said(lambda: checked(ScoringEngine(model="other"), baseline))
    )
    assert "prompt_logprobs" in said(lambda: checked(ScoringEngine(scores=False), baseline))
    assert "--api-key-file" in said(lambda: checked(ScoringEngine(key="secret"), baseline))
    assert GoldenVerdict.SAME is checked(ScoringEngine(key="secret"), baseline, key="secret").verdict
    assert "vLLM's JSON" in said(lambda: checked(ScoringEngine(garbage=True), baseline))
    assert "no log-probabilities" in said(lambda: checked(ScoringEngine(raw_logits=True), baseline))
    assert "is vLLM up" in said(lambda: asyncio.run(check_engine("http://127.0.0.1:9", baseline)))
    login = said(lambda: asyncio.run(check_engine("http://me:secret@127.0.0.1:9", baseline)))
    assert "secret" not in login
    assert "records one" in said(lambda: baselines.load(tmp_path / "none"))
    (tmp_path / "bad").write_text('{"version": 1}')
    assert "no baseline" in said(lambda: baselines.load(tmp_path / "bad"))
    (tmp_path / "cut").write_bytes(msgspec.json.encode(baseline)[:-9])
    assert "no baseline" in said(lambda: baselines.load(tmp_path / "cut"))


def test_mistakes_of_a_record_are_one_sentence():
    long = dataclasses.replace(PLAN, prompts=PromptSet(prompts=(TextPrompt("long", "x" * 200),)))
    assert re.fullmatch(r"prompt 'long' .*201 tokens; .*128", said(lambda: recorded(ScoringEngine(), long)))
    assert said(lambda: recorded(ScoringEngine(), dataclasses.replace(PLAN, model="big"))).endswith("tiny, not big")
    assert "damaged already" in said(lambda: recorded(ScoringEngine(nan="400")))
    cut = dataclasses.replace(long, prompts=msgspec.structs.replace(long.prompts, cut=True))
    assert 127 == len(recorded(ScoringEngine(), cut).prompts[0].alone)


def test_baseline_replaces_no_other_unasked(baseline, tmp_path):
    path = tmp_path / "tiny.golden.json"
    baselines.save(path, baseline, replace=False)
    assert baseline == baselines.load(path)
    assert "exists" in said(lambda: baselines.save(path, baseline, replace=False))
    baselines.save(path, baseline, replace=True)
    assert "cannot be written" in said(lambda: baselines.save(tmp_path / "no" / "x", baseline, replace=True))
    assert [path] == list(tmp_path.iterdir()), "nothing half-written"


# ---- records


def test_every_request_is_a_probe_in_the_log(baseline, tmp_path):
    log = tmp_path / "probes.jsonl"
    found = checked(ScoringEngine(), baseline, probe_log=log)
    records = list(read_records([log]))
    assert found.requests == len(records)
    assert {(PROBE_TEAM, "tiny", "ok", "length")} == {(r.team, r.model, r.outcome, r.finish_reason) for r in records}
    assert found.tokens == sum((r.prompt_tokens or 0) + (r.completion_tokens or 0) for r in records)


def test_nan_answer_is_recorded_as_the_engine_counts_it(baseline, tmp_path):
    """The engine counts the request as finished; only its answer could not be written."""
    log = tmp_path / "probes.jsonl"
    checked(ScoringEngine(nan="400"), baseline, probe_log=log)
    last = list(read_records([log]))[-1]
    assert ("client_abort", "length", 400) == (last.outcome, last.finish_reason, last.status)
    assert (len(baseline.prompts[0].ids), 1) == (last.prompt_tokens, last.completion_tokens)


def test_probe_log_that_cannot_be_written_stops_the_check(baseline, tmp_path):
    assert "cannot be written" in said(lambda: checked(ScoringEngine(), baseline, probe_log=Path(tmp_path)))

"""Every runbook page, tried as whoever is on call will use it: its queries answer while its alert fires, its commands
change nothing in the first five minutes, what it names exists, and it gives no advice that is known to harm. The ground
of the first is case_scene.py."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import click
import msgspec
import pytest

from alerts import settings, slo, thresholds
from alerts.labels import TARGET_POD
from alerts.registry import ALERTS, RECORDINGS
from dashboards.registry import BOARDS
from exporters import sidecar, sidecar_config, source_status
from exporters.catalogue import EVERYTHING, promql_ast, vllm
from exporters.catalogue import gateway as gateway_series
from exporters.catalogue import sidecar as sidecar_series
from exporters.dataset import ship_config
from exporters.engine.liveness import Cause, EngineState
from exporters.events import log
from exporters.requests import record as request_log
from exporters.tracing.config import OtlpConfig
from runbooks import diagnosis, lookup
from runbooks import page as runbook_page
from runbooks.page import RunbookPage
from stack.cli import COMMANDS, main
from stack.gateway import config as gateway_config
from stack.gateway import policy
from stack.gateway.reasons import REASONS
from tests.support import alert_cases as cases
from tests.support import case_scene, panel_fixtures
from tests.support.case_scene import ALERT, Asker, slots, steps_asked

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"
PAGES = runbook_page.pages()
OF_ALERTS = [page for page in PAGES if page.is_alert]
SAMPLES = {sample: metric for metric in EVERYTHING for sample in metric.samples}
RECORDED = {recording.record for recording in RECORDINGS}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
each_alerts_page = pytest.mark.parametrize("page", OF_ALERTS, ids=lambda page: page.name)


# ---- what a page asks and runs


def any_labels(page: RunbookPage) -> RunbookPage:
    """A page opened without an alert: every placeholder in PromQL matches everything."""
    return page.filled({})


def asked(page: RunbookPage) -> list[str]:
    """Every PromQL on a page: wherever a block stands, and the conditions."""
    return shown(page) + [row.condition for row in page.rows if row.condition]


def shown(page: RunbookPage) -> list[str]:
    return [text for language, text in _blocks(page.text) if language == "promql"]


def run(page: RunbookPage) -> list[str]:
    return [text for language, text in _blocks(page.text) if language == "bash"]


def _blocks(text: str) -> list[tuple[str, str]]:
    return [(found[2], re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)) for found in _BLOCK.finditer(text)]


_BLOCK = re.compile(r"^([ ]*)```(\w+)\n(.*?)^[ ]*```$", re.DOTALL | re.MULTILINE)
# All that a shell or PromQL could read as more than a value, and a line's end, which has a branch of its own.
NASTY = ("-rf a'b\"c $(touch x) `id`; rm -rf / | * ( \\ ${IFS} #", "a\nb")


def filled_by(page: RunbookPage, value: str) -> RunbookPage:
    return page.filled(dict.fromkeys(runbook_page.placeholders(page.text), value))


# ---- alert, page, panel


@each_alerts_page
def test_page_links_the_panel_and_names_the_severity(page):
    """A page leads to the panel of its alert and says how loud it is."""
    alert = ALERT[page.name]
    assert alert is page.alert
    assert alert.labels["severity"] == page.severity
    assert alert.panel.url("http://grafana") == lookup.panel_url(page, "http://grafana")


def test_every_red_line_on_a_panel_has_an_alert_and_so_a_page():
    """Who sees a line crossed, on whichever board, finds what to do."""
    lines = {panel.threshold.name for board in BOARDS for panel in board.panels if panel.threshold}
    assert set() == lines - {alert.threshold.name for alert in ALERTS if alert.threshold}


@each_alerts_page
def test_a_page_can_be_read_at_night(page):
    """Few steps, few rows, and every measure with what follows, how one sees it, and the way back."""
    assert 2 <= len(page.steps) <= 6
    assert 2 <= len(page.rows) <= 8
    assert 1 <= len(page.mitigations) <= 6
    assert len(page.body.splitlines()) <= 150 + 6 * len(page.rows)  # a condition takes six lines
    for step in page.mitigations:
        missing = [word for word in ("Expected", "Verify", "Undo") if word.lower() not in step.text.lower()]
        assert not missing, f"Mitigation {step.number} says nothing of {missing}: {step.text}"


# ---- queries, read


def test_every_alert_has_its_diagnosis_and_the_page_shows_it():
    assert {page.name for page in OF_ALERTS} == set(diagnosis.ROWS)
    for page in OF_ALERTS:
        shown = [replace(row, finding="") for row in diagnosis.ROWS[page.name]]
        assert shown == list(page.rows), page.name


@each_page
def test_queries_and_conditions_use_existing_series(page):
    """Queries and conditions ask only for series that exist whatever is filled in."""
    for filled in (any_labels(page), *(filled_by(page, value) for value in ("plain", *NASTY))):
        for text in asked(filled):
            assert promql_ast.names(text) <= SAMPLES.keys() | RECORDED, text


@each_page
def test_queries_use_no_lost_label_and_no_zero_divisor(page):
    """Two sides whose labels differ never match, so such a row could never hold. 0/0 would show as NaN at night; a
    comparison lets none through."""
    for text in asked(any_labels(page)):
        if not promql_ast.names(text) & (RECORDED | {"ALERTS"}):
            assert [] == promql_ast.lost_labels(text, labels_of), text
    for text in shown(any_labels(page)):
        assert [] == promql_ast.unguarded(text) or _compared(text), text


def _compared(text: str) -> bool:
    """Whether every quotient is compared with something further out."""
    above = [read.above for read in promql_ast.reads(text) if "/" in read.above]
    return all({">", "<", ">=", "<=", "=="} & set(ops[len(ops) - ops[::-1].index("/") :]) for ops in above)


@cache
def labels_of(sample: str) -> frozenset[str]:
    """Those that are on any series of this name, and those that only some deployments have."""
    return frozenset(label for labels in everything()[sample] for label in labels) | set(TARGET_POD)


@each_page
def test_condition_selectors_can_match(page):
    """A label that nobody writes makes a row that never holds, and nobody would notice. A page of no alert names hosts
    and jobs as examples."""
    for text in asked(any_labels(page)):
        for name, written in promql_ast.selectors(text):
            matchers = [m for m in written if page.is_alert or m[0] not in ("job", "instance")]
            assert name in RECORDED or any(_meets(labels, matchers) for labels in everything()[name]), (
                f"{name} {matchers} in {text}"
            )


def _meets(labels: Mapping[str, str], matchers: Iterable[tuple[str, str, str]]) -> bool:
    return all(
        ((re.fullmatch(value, labels.get(label, "")) is not None) if "~" in op else labels.get(label, "") == value)
        is ("!" not in op)
        for label, op, value in matchers
    )


@cache
def everything() -> dict[str, list[Mapping[str, str]]]:
    """The label sets of each sample name in the whole scene, and those that a fault brings."""
    found: dict[str, list[Mapping[str, str]]] = {name: [] for name in SAMPLES}
    pairs = next(scene for scene in panel_fixtures.scenes() if scene.name == "prefill-decode")
    for line in (*case_scene.whole_scene(), *pairs.lines):
        found.setdefault(line.name, []).append(line.labels)
    for metric in EVERYTHING:
        if metric.native:  # as on the classic series, without le
            found[metric.name] = [
                {k: v for k, v in labels.items() if k != "le"} for labels in found[f"{metric.name}_count"]
            ]
        for sample in metric.samples:  # an engine shows the newer name or an older one
            found[sample] = found[sample] or found.get(
                re.sub(r"^.*?(_bucket|_sum|_count|)$", rf"{metric.name}\1", sample), []
            )
    found[vllm.HTTP_REQUESTS.name] += [
        {**cases.ENGINE, "handler": "/v1/chat/completions", "method": "POST", "status": "5xx"}
    ]
    for metric, target in ((gateway_series.ENGINE_STATE, cases.GATEWAY), (sidecar_series.ENGINE_STATE, cases.SIDECAR)):
        found[metric.name] += [
            {**target, "upstream": "vllm-0", "address": cases.A, "state": str(state), "evidence": str(cause)}
            for state in EngineState
            for cause in Cause
        ]
    scraped = {"job": "sidecar", "instance": cases.SIDECAR["instance"]}
    found[sidecar_series.SOURCE_ERRORS.name] += [
        {**scraped, "kind": kind, "source": kind, "reason": reason}
        for kind, reasons in source_status.REASONS.items()
        for reason in reasons
    ]
    return found


# ---- queries, on a real Prometheus


@pytest.fixture(scope="module")
def ask(part, tmp_path_factory) -> Iterator[Asker]:
    with case_scene.served(part, tmp_path_factory.mktemp("pages")) as asker:
        yield asker


each_slot = pytest.mark.parametrize("slot", slots(), ids=lambda slot: str(slot.case))


@pytest.mark.prometheus
@each_slot
def test_what_the_alert_tells_is_true_in_the_scene_around_it(slot, ask):
    """Else the queries of the page were tried on an hour in which all is well."""
    found = ask(ALERT[slot.case.alert].expr, slot.at_s)
    assert any(slot.case.labels.items() <= labels.items() for labels in found), found


@pytest.mark.prometheus
@each_slot
def test_a_row_of_the_diagnosis_holds_when_the_alert_fires(slot, ask):
    held = [row.what for row in slot.page.rows if ask(row.condition, slot.at_s)]
    assert held, "\n".join(row.condition for row in slot.page.rows)


@pytest.mark.prometheus
@each_alerts_page
def test_first_five_minutes_queries_answer_when_firing(page, ask):
    """An alert with several cases has several sources: what one of them lacks, such as a sidecar, another has."""
    its = [slot for slot in slots() if slot.case.alert == page.name]
    assert its, "alert_cases.py has no case of this alert"
    for number, query in enumerate(steps_asked(page)):
        assert any(ask(steps_asked(slot.page)[number], slot.at_s) for slot in its), query
    for slot in its:
        assert not steps_asked(page) or any(ask(query, slot.at_s) for query in steps_asked(slot.page)), (
            f"{slot.case}: no query answers"
        )


# ---- commands


@each_page
def test_every_command_is_shell_whatever_is_filled_in(page):
    for text in run(page):
        told = runbook_page.fill(f"```bash\n{text}```\n", {}) == f"```bash\n{text}```\n"
        for filled in (
            [text]
            if told
            else [one for value in ("plain", *NASTY) for one in run(runbook_page.parse("", _with(text, value)))]
        ):
            done = subprocess.run(["bash", "-n"], input=filled, capture_output=True, text=True, check=False)
            assert 0 == done.returncode, f"{done.stderr}\n{filled}"


def _with(text: str, value: str) -> str:
    """A block of commands with every placeholder filled by this value."""
    page = f"```bash\n{text}```\n"
    return runbook_page.fill(page, dict.fromkeys(runbook_page.placeholders(page), value))


# What may run in the first five minutes: program -> what its arguments must look like.
_READERS = (
    "awk basename cat column cut date df dig dirname du echo free getent grep head ibstat jq ls lsof nc ntpq paste"
    " pgrep ps sha256sum sleep sort ss stat tail tr uniq uptime vmstat wc"
)
READ_ONLY: dict[str, str] = dict.fromkeys(_READERS.split(), r".*") | {
    "amtool": r"(alert|check-config|config|silence query|cluster)\b.*",
    "chronyc": r"(tracking|sources).*",
    "curl": (
        r"(?!.*((^|\s)(-X|--request)(?!\s*(GET|POST)\b)|--upload-file|(^|\s)-T\s|/-/(reload|quit)|/sleep|/wake_up|/reset_|/pause|/abort)).*"
    ),
    "dmesg": r"(?!.*(--clear|-C\b|-c\b)).*",
    "docker": r"(compose )?(-f \S+ )*(ps|logs|inspect|stats|top|images|config|version|port|network ls|volume ls)\b.*",
    "ip": r"(-\w+ )*(addr|link|route|neigh)( show.*)?",
    "journalctl": r"(?!.*--(vacuum|rotate|flush)).*",
    "kubectl": r"(-n \S+ |--namespace[ =]\S+ )?(get|describe|logs|top|explain|version)\b.*",
    "nvidia-smi": r"(?!.*(-r\b|--gpu-reset|-pl\b|-pm\b|-e [01]|-mig\b|-ac\b|-rac\b|-lgc\b|-rgc\b|--reset)).*",
    "ping": r".*-c ?\d.*",
    "promtool": r"(check|query|debug metrics)\b.*",
    "py-spy": r"dump\b.*",
    "python3": r"-m json\.tool|-c Q",
    "sed": r"(?!.*-i).*",
    "systemctl": r"(status|show|list-units|is-active|cat)\b.*",
    "timedatectl": r"(status|show|timesync-status)?",
    "top": r".*-b.*",
    "vllm-watch": r"(runbook|metrics|alerts list|doctor|sidecar explain|(gateway|golden) check|events|ship verify)\b.*",
    "wget": r"(?=.*(-qO ?-|-O ?- )).*",
}
_BEFORE = (
    r"do|then|else|if|while|time|!|sudo|timeout[ \t]+\S+|docker compose exec (?:-T )?\S+|kubectl (?:-n \S+ )?exec"
    r" [^|;&\n]*? --|\w+=\S*"
)
_STARTS = re.compile(
    rf"(?:^|[|;&({{])[ \t]*(?:(?:{_BEFORE})[ \t]+)*(?!\w+=)([A-Za-z][\w./-]*)[ \t]*([^|;&()\n]*)", re.MULTILINE
)
_WORDS_OF_THE_SHELL = {
    "for",
    "do",
    "done",
    "then",
    "else",
    "fi",
    "test",
    "read",
    "true",
    "exit",
    "wait",
    "printf",
    "set",
}


def started(text: str) -> list[tuple[str, str]]:
    """The programs that a block starts, each with its arguments, also those inside $(...); what stands in quotes is no
    program."""
    plain = re.sub(r"^[ \t]*#.*$", "", re.sub(r"\\\n\s*", " ", text), flags=re.MULTILINE)
    plain = re.sub(r"\b(?:ba)?sh -c '([^']*)'", r"\1", plain)
    plain = re.sub(r"docker compose run (?:--rm |--no-deps |-T )*--entrypoint (\S+) \S+", r"\1", plain)
    plain = re.sub(r"(?<!\S)#.*$", "", re.sub(r"'[^']*'", "Q", plain), flags=re.MULTILINE)
    inner = []
    while found := re.search(r"\$\(([^()]*)\)", plain):
        inner.append(found[1])
        plain = plain.replace(found[0], "Q")
    plain = re.sub(r"\"(?:\\.|[^\"\\])*\"", "Q", plain)
    return [
        (found[1], found[2].strip())
        for one in (plain, *inner)
        for found in _STARTS.finditer(one)
        if found[1] not in _WORDS_OF_THE_SHELL
    ]


@each_alerts_page
def test_nothing_in_the_first_five_minutes_changes_anything(page):
    steps = (*page.first, *page.steps)
    for text in (block.text for step in steps for block in step.blocks if block.language == "bash"):
        written = re.findall(r"(?<![&>])>>?\s*([^\s&|;>]+)", re.sub(r"'[^']*'|\"[^\"]*\"", "Q", text))
        kept = [file for file in written if file != "/dev/null" and not re.fullmatch(r"[\w-]+\.(txt|log)", file)]
        assert not kept, f"writes {kept}, which is neither evidence in a file of its own nor /dev/null: {text}"
        assert not re.search(r"python3 -c .*\b(open|os|subprocess|shutil|Path)\b", text, re.DOTALL), text
        for program, arguments in started(text):
            assert program in READ_ONLY, (
                f"{program} is not known to be read-only; look, then add it to READ_ONLY: {text}"
            )
            assert re.fullmatch(READ_ONLY[program], arguments), f"{program} {arguments} may change something: {text}"


# Page -> steps that only one platform has, with the reason.
ONE_PLATFORM: dict[tuple[str, str], str] = {}


def platforms(step: runbook_page.RunbookStep) -> set[str]:
    text = "\n".join([step.text, *(block.text for block in step.blocks)])
    return {tool for tool in ("docker compose", "kubectl") if re.search(rf"\b{tool}\b", text)}


@each_alerts_page
def test_every_step_names_compose_and_kubernetes_or_neither(page):
    for section, steps in (("first", page.first), ("steps", page.steps), ("mitigations", page.mitigations)):
        for step in steps:
            alone = (page.name, f"{section} {step.number}") in ONE_PLATFORM
            assert alone == (len(platforms(step)) == 1), f"{section} {step.number}: {step.text}"


# Objects that belong to no namespace.
CLUSTER_WIDE = r"(?:cordon|uncordon|drain|(?:describe|get|top) nodes?|version)\b"


@each_page
def test_every_kubectl_command_names_its_place(page):
    """A namespace or all of them; in a pod of ours, which has several containers, also the container. In an engine's
    pod the first one is the engine."""
    for command in re.findall(r"kubectl [^\n`|]*", "\n".join([*run(page), *code_spans(page)])):
        if not re.match(rf"kubectl {CLUSTER_WIDE}", command):
            assert re.match(r"kubectl (-n \S+ |get .* (-A|--all-namespaces)\b)", command), command
        if re.search(r" (exec|logs) ", command) and re.search(r"(?i)gateway|sidecar", page.name + command):
            assert " -c " in command, command


def code_spans(page: RunbookPage) -> list[str]:
    return re.findall(r"`(kubectl [^`]*)`", page.body)


@each_alerts_page
def test_the_table_of_the_diagnosis_can_be_read(page):
    for row in page.rows:
        for cell in (row.what, row.cause, row.go_to):
            assert len(cell) <= 120, cell


@pytest.mark.parametrize(
    "text",
    [
        "docker compose restart gateway",
        "kubectl delete pod x",
        "kubectl -n a drain NODE",
        "systemctl restart vllm",
        "rm -rf /",
        "kill -9 1",
        "nvidia-smi -i GPU-1 --gpu-reset",
        "nvidia-smi -pl 300",
        "curl -X DELETE http://127.0.0.1",
        "curl -X POST http://127.0.0.1/-/reload",
        "ps aux | xargs kill",
        "for i in 1; do kubectl scale x; done",
        "timeout 5 reboot",
        "X=1 docker rm y",
        "sudo tee /etc/x",
    ],
)
def test_changing_and_reading_commands_differ(text):
    """A command that changes something is told from one that reads."""
    commands = started(text)
    assert any(
        program not in READ_ONLY or not re.fullmatch(READ_ONLY[program], arguments) for program, arguments in commands
    )


# ---- names


OPTIONS = frozenset((GOLDEN / "vllm-options-0.32.txt").read_text().split())

# Options that are not those of vllm serve: the tool, which must be named in the same section, and its options.
TOOLS: dict[str, frozenset[str]] = {
    "vllm bench serve": frozenset((GOLDEN / "vllm-bench-options-0.32.txt").read_text().split()),
    "vLLM 0.33": frozenset({"--watchdog-config"}),
    "nvidia-smi": frozenset(
        {"--query-gpu", "--query-compute-apps", "--query-remapped-rows", "--format", "--gpu-reset"}
    ),
    "docker compose": frozenset(
        {"--force-recreate", "--tail", "--since", "--no-deps", "--rm", "--format", "--entrypoint", "--timeout"}
    ),
    "docker": frozenset({"--tail", "--since", "--format"}),
    "kubectl": frozenset(
        {
            "--prefix",
            "--previous",
            "--tail",
            "--since",
            "--show-labels",
            "--sort-by",
            "--timestamps",
            "--from-file",
            "--dry-run",
        }
    ),
    "systemctl": frozenset({"--no-pager", "--lines"}),
    "journalctl": frozenset({"--no-pager", "--since"}),
    "py-spy": frozenset({"--pid", "--locals"}),
    "curl": frozenset({"--data-urlencode"}),
    "amtool": frozenset({"--alertmanager.url", "--duration", "--comment"}),
}


@cache
def ours_options() -> frozenset[str]:
    """The options of every command of ours."""
    found: set[str] = set()

    def visit(command: click.Command) -> None:
        found.update(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
        for inner in getattr(command, "commands", {}).values():
            visit(inner)

    for command in (main, *(listed.real() for listed in COMMANDS)):
        visit(command)
    return frozenset(found)


@each_page
def test_options_on_a_page_belong_to_a_named_tool(page):
    """Every option on a page is one of vLLM or of a tool that the section names."""
    for section in page.sections:
        for option in re.findall(r"(?<![\w-])--[a-zA-Z][\w.-]*\w", section.text):
            of_tools = any(tool in section.text and option in options for tool, options in TOOLS.items())
            of_ours = "vllm-watch" in section.text and option in ours_options()
            known = option in OPTIONS or of_tools or of_ours
            assert known, f"{option} under {section.heading} is no option of vllm serve 0.32, nor of a tool named there"


def test_every_option_of_a_tool_in_the_table_is_on_a_page():
    text = "\n".join(page.text for page in PAGES)
    unused = {
        tool: sorted(o for o in options if o not in text)
        for tool, options in TOOLS.items()
        if tool != "vllm bench serve"
    }
    assert {} == {tool: options for tool, options in unused.items() if options}


@each_page
def test_environment_variables_on_a_page_are_read(page):
    """By vLLM, or by our compose file."""
    compose = set(
        re.findall(r"\bVLLM_WATCH_\w+", (ROOT / "docker-compose.yml").read_text() + (ROOT / "Makefile").read_text())
    )
    assert set(re.findall(r"\bVLLM_[A-Z0-9_]+\b", page.text)) <= OPTIONS | compose


# Words of code that are neither a series, a label, a field of our files nor a reason of the gateway: whose they are.
FOREIGN: dict[str, str] = {
    "max_tokens": "the OpenAI API", "tool_calls": "the OpenAI API", "system_fingerprint": "the OpenAI API",
    "max_model_len": "vLLM's list of models",
    "max_new_tokens": "a model's generation_config.json", "cache_salt": "vLLM's API", "return_token_ids": "vLLM's API",
    "prompt_logprobs": "vLLM's API", "date_string": "chat templates",
    "kv_load_failure_policy": "vLLM's --kv-transfer-config", "kv_lease_duration": "vLLM's --kv-transfer-config",
    "num_speculative_tokens": "vLLM's --speculative-config",
    "num_speculative_tokens_per_batch_size": "vLLM's --speculative-config",
    "dump_dir": "vLLM's --watchdog-config",
    "rejection_sample_method": "vLLM's --speculative-config", "max_num_queued_tokens": "vLLM's reason of a refusal",
    "alert_relabel_configs": "Prometheus's configuration", "metric_relabel_configs": "Prometheus's configuration",
    "path_prefix": "Prometheus's configuration", "sample_limit": "Prometheus's configuration",
    "mute_time_intervals": "Alertmanager's configuration",
    "webhook_configs": "Alertmanager's configuration", "stop_grace_period": "a compose file",
    "all_reduce_perf": "nccl-tests", "port_xmit_wait": "the kernel's InfiniBand counters",
    "link_downed": "the kernel's InfiniBand counters",
    "symbol_error": "the kernel's InfiniBand counters",
}  # fmt: skip
_STRUCTS: tuple[type[msgspec.Struct], ...] = (
    settings.Overrides,
    slo.Objective,
    slo.Objectives,
    request_log.RequestRecord,
    log.TuningEvent,
    sidecar_config.SidecarConfig,
    ship_config.ShipConfig,
    sidecar_config.EngineTarget,
    sidecar_config.TeamSettings,
    sidecar.Prices,
    OtlpConfig,
    gateway_config.GatewayConfig,
    gateway_config.GatewayLimits,
    gateway_config.Timeouts,
    policy.Policy,
    policy.Team,
    policy.Band,
    policy.Canary,
    policy.Capacity,
    policy.ServedModel,
    policy.Upstream,
)


@cache
def words_of_ours() -> frozenset[str]:
    """What a page may write as code: reasons, thresholds, fields of files, and series with their labels and what those
    hold."""
    fields = {field.name for struct in _STRUCTS for field in msgspec.structs.fields(struct)}
    labels = {word for sets in everything().values() for one in sets for pair in one.items() for word in pair}
    parts = {part for name in SAMPLES for part in (name, name.removeprefix("vllm:"), name.removeprefix("vllm_watch_"))}
    reasons = {reason for some in source_status.REASONS.values() for reason in some} | REASONS.keys()
    return frozenset(
        fields
        | labels
        | parts
        | reasons
        | {threshold.name for threshold in thresholds.ALL}
        | {m.name for m in EVERYTHING}
    )


@each_page
def test_every_word_of_code_on_a_page_is_one_that_somebody_knows(page):
    """A reason, a threshold or a field of a file that is not called so any more would be looked for in vain."""
    words = set(re.findall(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+)+)`", page.text))
    assert set() == words - words_of_ours() - FOREIGN.keys()


def test_every_foreign_word_is_on_a_page():
    text = "\n".join(page.text for page in PAGES)
    assert [] == [word for word in FOREIGN if f"`{word}`" not in text]


@each_page
def test_every_series_named_in_the_words_of_a_page_exists(page):
    """Also outside of queries. A name that ends in _ stands for a family."""
    named = re.findall(r"\b(?:vllm:\w+|vllm_watch_[a-z_0-9]+|DCGM_FI_\w+)", page.text)
    families = {metric.name for metric in EVERYTHING}
    record_parts = {part for record in RECORDED for part in record.split(":")}
    unknown = {
        name for name in named if name not in SAMPLES.keys() | families | record_parts and not name.endswith("_")
    }
    assert set() == unknown


# ---- advice


@dataclass(frozen=True, slots=True)
class Harm:
    """Advice that is known to harm. A sentence that matches `says` must match `unless` as well. allowed: pages where it
    is right, and why."""

    says: str
    unless: str
    why: str
    allowed: Mapping[str, str] | None = None


_WARNS = r"\b([Nn]ever|[Nn]ot|[Nn]or|[Nn]one|instead of|without|[Oo]nly)\b"
HARMS = (
    Harm(
        r"(?i)\b(lower|reduc|decreas)\w*\b[^.,;:]*gpu-memory-utilization|gpu-memory-utilization[^.,;:]*\b(lower|smaller)\b",
        rf"{_WARNS}|worse",
        "a smaller share makes the KV cache smaller, and preemptions more",
        {
            "VLLMGPUMemoryNearlyFull": "there the GPU's memory is short, not the cache",
            "VLLMRestartLoop": "there the engine does not fit",
            "VLLMSlowStart": "there the engine does not fit",
            "VLLMEngineDown": "there the engine ran out of memory",
        },
    ),
    Harm(
        r"(?i)\b(rais|increas|higher|larger)\w*\b[^.,;:]*--max-num-seqs",
        rf"{_WARNS}|\b(if|when|while|where|as long as|worse)\b",
        "more running requests need more KV cache; where that is short they are preempted",
    ),
    Harm(
        r"(?i)kill -9|SIGKILL",
        rf"{_WARNS}|\b(last|else|kernel|after|by|no)\b",
        "running requests are lost without a word; SIGTERM first",
    ),
    Harm(
        r"no-enable-prefix-caching|(?i:disabl\w+ prefix cach\w+)",
        _WARNS,
        "prefill costs several times as much without the prefix cache",
    ),
    Harm(
        r"VLLM_ALLOW_LONG_MAX_MODEL_LEN|--trust-remote-code|VLLM_SKIP_P2P_CHECK",
        _WARNS,
        "it hides a fault, or runs foreign code",
    ),
    Harm(
        r"docker compose down.*(-v\b|--volumes)|docker volume rm",
        _WARNS,
        "volumes hold the keys, the request log and Prometheus's data",
    ),
    Harm(
        r"\brm\b.*(requests|events)\.jsonl|truncate.*\.jsonl",
        _WARNS,
        "the log is what accounting rests on; rotate it instead",
    ),
    Harm(
        r"--gpu-reset|(?i:\breset the (GPU|gpu)\b)",
        rf"{_WARNS}|[Dd]rain|stop|[Aa]fter",
        "all work is lost, and what is linked to the GPU hangs",
    ),
    Harm(r"amtool silence add", r"(--duration|-d )", "a silence without an end hides the next outage as well"),
    Harm(
        r"(?i)\braise the threshold\b",
        rf"{_WARNS}|\b(if|when|where|before|after|unless)\b",
        "an alert that disturbs is no wrong alert",
    ),
)


def sentences(page: RunbookPage) -> list[str]:
    """Tables left out: they tell causes, not what to do."""
    return [
        sentence.strip()
        for sentence in re.split(r"(?<=[.!?])\s+|\n", page.body)
        if sentence.strip() and not sentence.startswith("|")
    ]


@each_page
def test_a_page_gives_no_advice_that_is_known_to_harm(page):
    for harm in HARMS:
        if page.name not in (harm.allowed or {}):
            told = [
                sentence
                for sentence in sentences(page)
                if re.search(harm.says, sentence) and not re.search(harm.unless, sentence)
            ]
            assert not told, f"{harm.why}: {told}"


@each_page
def test_a_page_that_resets_a_card_says_when_never(page):
    if "--gpu-reset" in page.text:
        assert re.search(r"Never reset a (GPU|GPU) (that|while)", page.text)


@pytest.mark.parametrize(
    ("advice", "harms"),
    [
        ("Lower `--gpu-memory-utilization` by 0.05.", True),
        ("Never lower `--gpu-memory-utilization` against preemption.", False),
        ("Raise `--max-num-seqs`.", True),
        ("Raise `--max-num-seqs` only while the cache has room.", False),
        ("Set `--no-enable-prefix-caching`.", True),
        ("Run `docker compose down -v`.", True),
        ("Send SIGKILL to the engine.", True),
        ("`nvidia-smi -i UUID --gpu-reset`.", True),
        ("`amtool silence add alertname=X`", True),
    ],
)
def test_harmful_advice_is_told_from_a_warning(advice, harms):
    page = runbook_page.parse("VLLMSomething", f"# VLLMSomething\n\n{advice}\n")
    found = [
        harm for harm in HARMS for s in sentences(page) if re.search(harm.says, s) and not re.search(harm.unless, s)
    ]
    assert harms == bool(found)

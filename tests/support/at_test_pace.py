"""`vllm-watch` with the intervals of tests: `python -m tests.support.at_test_pace COMMAND ...`.

The command is the product's own, in a process of its own; only times differ, and they keep their order.
doctor: all of them halved, with a look every second. lab: scrapes, rules and its own checks each second. drill: the
same, and the times of most alerts halved."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import vllm_watch
from stack.cli import doctor as doctor_command
from stack.doctor import diagnose
from stack.doctor.checks import failures
from stack.drill import drills
from stack.drill import lab as drill_lab
from stack.lab import plan, up

STILL_S = failures.LEAST_STILL_S / 2  # without progress, until an engine counts as frozen
DRILL_PACE = 2 * drills.QUICK
_BEAT = plan.Beat(scrape_s=1, evaluate_s=1, resend_s=1)
_TIMEOUT_S = 4.0  # of a page; by default 10 s


def main() -> None:
    """Set the intervals and run the command of the command line."""
    diagnose.LEAST_STILL_S = failures.LEAST_STILL_S = STILL_S
    diagnose.LEAST_SECONDS /= 2
    doctor_command.LOOK_S = 1.0
    doctor_command.scrape_engine = partial(doctor_command.scrape_engine, timeout_s=_TIMEOUT_S)
    up.LabConfig = partial(plan.LabConfig, beat=_BEAT)
    up._BEAT_S, up._TELL_EVERY_S, up.SHORTEST_S = 0.5, 1.0, 5.0
    drill_lab.BEAT, drill_lab.PROMETHEUS = _BEAT, ("--web.enable-admin-api", "--query.lookback-delta=10s")
    drills.DRILLS = tuple(
        replace(drill, pace=DRILL_PACE) if drill.pace == drills.QUICK else drill for drill in drills.DRILLS
    )
    vllm_watch.main()


if __name__ == "__main__":
    main()

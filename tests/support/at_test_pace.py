"""`vllm-watch` with the intervals of tests: `python -m tests.support.at_test_pace COMMAND ...`.

The command is the product's own, in a process of its own; only times differ, and they keep their order.
doctor: all of them halved, with a look every second. lab: scrapes, rules and its own checks each second."""

from __future__ import annotations

from functools import partial

from stack import cli
from stack.cli import doctor as doctor_command
from stack.doctor import diagnose
from stack.doctor.checks import failures
from stack.lab import plan, up

STILL_S = failures.LEAST_STILL_S / 2  # without progress, until an engine counts as frozen
_TIMEOUT_S = 4.0  # of a page; by default 10 s


def main() -> None:
    """Set the intervals and run the command of the command line."""
    diagnose.LEAST_STILL_S = failures.LEAST_STILL_S = STILL_S
    diagnose.LEAST_SECONDS /= 2
    doctor_command.LOOK_S = 1.0
    doctor_command.scrape_engine = partial(doctor_command.scrape_engine, timeout_s=_TIMEOUT_S)
    up.LabConfig = partial(plan.LabConfig, beat=plan.Beat(scrape_s=1, evaluate_s=1, resend_s=2))
    up._BEAT_S, up._TELL_EVERY_S, up.SHORTEST_S = 0.5, 1.0, 5.0
    cli.main()


if __name__ == "__main__":
    main()

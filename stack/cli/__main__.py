"""`python -m stack.cli`, for where the command is not on the path."""

from stack.cli import main

main(prog_name="vllm-watch")

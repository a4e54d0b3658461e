"""`python -m stack.cli`, for where the command is not on the path."""

from vllm_watch import main

main()

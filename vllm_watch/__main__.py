"""`python -m vllm_watch`, for where the command is not on the path."""

from vllm_watch import main

main()

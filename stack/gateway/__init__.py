"""Gateway in front of vLLM: authentication, admission, request log.

`run` is the process, `serve` the same inside a running loop, `make_key` a new key for a team."""

from stack.gateway.config import GatewayConfig
from stack.gateway.serve import Started, run, serve
from stack.gateway.teams import make_key

__all__ = ["GatewayConfig", "Started", "make_key", "run", "serve"]

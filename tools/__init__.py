"""Maintenance tools: pins, audit, release.

Not part of the installed product; `make pins`, `make audit` and `make release` run them."""

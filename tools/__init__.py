"""What keeps the project up: pins, audit, release. Not part of what is installed; `make pins`, `make audit`, `make
release` run it."""

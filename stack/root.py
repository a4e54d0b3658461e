"""Folder that holds the packages: the checkout, or site-packages of an installation."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

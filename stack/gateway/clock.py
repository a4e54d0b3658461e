"""Clock of admission and leases: it runs on while the machine is suspended, where the kernel has such a clock.

A lease lapses in the store meanwhile. A clock that stands still in suspend would let the gateway use it afterwards."""

from __future__ import annotations

import sys
import time

if sys.platform == "linux":

    def now() -> float:
        """Return the seconds since the machine started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    now = time.monotonic

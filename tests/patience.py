"""How long a test waits for what comes anyway where all is well: so that a hung test tells where it hung."""

from __future__ import annotations

from typing import Final

HUNG_S: Final = 240
"""What has not come by then does not come. Machines that run tests may be slow, shared, and stand still for seconds."""
HUNG_MS: Final = 1000 * HUNG_S

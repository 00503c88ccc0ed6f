"""Write the golden bytes anew: ``python -m tests.contract.golden > tests/contract/golden.txt``.

Only after raising the schema number, or when a field with a default was added: both must stay readable.
"""

from __future__ import annotations

import sys

from giornata.wire import codec
from tests.contract.messages import MESSAGES

if __name__ == "__main__":
    for message in MESSAGES:
        sys.stdout.write(f"{type(message).__name__} {codec.encode(message).hex()}\n")

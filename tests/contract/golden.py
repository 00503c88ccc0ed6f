"""What is on the wire, pinned: bytes of a message of each kind, and what an absent field means.

``python -m tests.contract.golden`` writes both anew: only after raising the schema number, or when a field that may be
absent was added. Both must stay readable.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from giornata import wire
from giornata.wire import codec
from giornata.wire.values import WireModel
from tests.contract.messages import MESSAGES

BYTES: Final = Path(__file__).with_name("golden.txt")
DEFAULTS: Final = Path(__file__).with_name("defaults.txt")
PLAIN: Final = TypeAdapter(dict[str, Any])


def message_lines() -> list[str]:
    """A line for each kind of message: its name and its bytes."""
    return [f"{type(message).__name__} {codec.encode(message).hex()}" for message in MESSAGES]


def default_lines() -> list[str]:
    """A line for each class of the wire: the fields that may be absent, and what that means."""
    for module in pkgutil.iter_modules(wire.__path__, f"{wire.__name__}."):
        importlib.import_module(module.name)
    lines = []
    for kind in sorted({*_below(WireModel)}, key=lambda kind: kind.__name__):
        absent = {
            name: field.get_default(call_default_factory=True, validated_data={})
            for name, field in kind.model_fields.items()
            if not field.is_required()
        }
        lines.append(f"{kind.__name__} {PLAIN.dump_json(absent).decode()}")
    return lines


def _below(kind: type[WireModel]) -> Iterator[type[WireModel]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith(f"{wire.__name__}."):
            yield one
        yield from _below(one)


if __name__ == "__main__":
    BYTES.write_text("".join(f"{line}\n" for line in message_lines()))
    DEFAULTS.write_text("".join(f"{line}\n" for line in default_lines()))

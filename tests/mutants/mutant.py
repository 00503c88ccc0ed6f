"""A small fault in one file, and the tests that should notice it; the hand-written list of them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FAULTS: Final = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True)
class Mutant:
    """A faulty text for one file, by its path from the checkout's root."""

    name: str
    file: str
    text: str
    tests: tuple[str, ...]
    """Test files, by their path from the checkout's root."""


class StaleFaultError(ValueError):
    """The text that an entry of the list replaces is not in its file, or is there more than once."""


@dataclass(frozen=True)
class Fault:
    """An entry of the list: `new` in the place of `old`, which occurs exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutant(self, root: Path = ROOT) -> Mutant:
        """The faulty file.

        Raises:
            StaleFaultError: the file has changed since the entry was written.
        """
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        count = text.count(self.old)
        if count != 1:
            raise StaleFaultError(
                f'the fault "{self.name}" of {FAULTS.name} replaces a text that occurs {count} times in {self.file}; '
                f"accepted: once. Write the entry for the code as it is now:\n{self.old}"
            )
        return Mutant(self.name, self.file, text.replace(self.old, self.new), self.tests)


def listed(path: Path = FAULTS) -> list[Fault]:
    """The hand-written faults. Their texts are whole lines."""
    entries: Sequence[dict[str, str | list[str]]] = tomllib.loads(path.read_text())["fault"]
    return [Fault(**(entry | {"tests": tuple(entry["tests"])})) for entry in entries]  # type: ignore[arg-type]  # TOML's

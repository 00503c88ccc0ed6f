"""How a run is told: counts as tables, and JSON. Pure but for printing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from giornata_lab.loadgen.outcomes import DistributionSummary, spread
from giornata_lab.rehearsals.chaos.audit import AuditedSystem, violations
from giornata_lab.rehearsals.chaos.edits import Door
from giornata_lab.rehearsals.chaos.plan import TARGETS, Kind

OUT: Final = Path("out") / "chaos.json"
SHOWN: Final = 20
"""Broken promises that are printed; the file has all."""


@dataclass(frozen=True)
class Report:
    """What one run has shown."""

    seed: int
    seconds: float
    """From the first edit to the last one's end."""
    seen: AuditedSystem
    violations: Sequence[str]

    @classmethod
    def of(cls, seed: int, seconds: float, seen: AuditedSystem) -> Report:
        """Judge what a run has left behind."""
        return cls(seed, seconds, seen, violations(seen))

    @property
    def counts(self) -> dict[str, int]:
        """Return how many edits and jobs there were, and what the run took."""
        outcomes = self.seen.outcomes
        ended = [record for record in self.seen.finally_.values() if record is not None]
        states = Counter(record.state.value for record in ended)
        failed = Counter(f"failed: {record.code}" for record in ended if record.code)
        return {
            "edits": len(outcomes),
            **{f"by {door}": sum(o.edit.door is door for o in outcomes) for door in Door},
            "accepted": sum(outcome.accepted for outcome in outcomes),
            **dict(states),
            **dict(failed.most_common()),
            "pictures": sum(len(outcome.pictures) for outcome in outcomes),
            "submissions beyond the first": sum(outcome.tries - 1 for outcome in outcomes),
            "requests made again": sum(outcome.again.total() for outcome in outcomes),
            "attempts": sum(record.attempt for record in ended),
            "attempts lost with their worker": sum(len(record.causes) for record in ended),
            "ends heard more than once": sum(len(events) > 1 for events in self.seen.done.values()),
            "faults": len(self.seen.faults),
            "blobs left to their time": len(self.seen.blobs),
        }

    def recoveries(self) -> dict[str, DistributionSummary | None]:
        """Seconds until the stack was whole, by kind of fault."""
        found = {
            kind: [
                f.recovery_s for f in self.seen.faults if f.fault.kind is kind and f.recovery_s is not None
            ]
            for kind in Kind
        }
        return {kind.value: spread(seconds) for kind, seconds in found.items()}

    def write(self, path: Path = OUT) -> None:
        """As JSON: everything that a look into a failure needs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._content(), indent=2, default=str) + "\n", encoding="utf-8")

    def _content(self) -> dict[str, Any]:
        seen = self.seen
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "counts": self.counts,
            "violations": list(self.violations),
            "asked_again": dict(self._again()),
            "latency_s": _rounded(spread([o.latency_s for o in seen.outcomes])),
            "recovery_s": {kind: _rounded(one) for kind, one in self.recoveries().items()},
            "faults": [fault.summary() for fault in seen.faults],
            "streams": asdict(seen.streams),
            "usage": [[one.summary() for one in samples] for samples in seen.usage.values()],
            "edits": [outcome.summary() for outcome in seen.outcomes],
        }

    def _again(self) -> list[tuple[str, int]]:
        return sum((outcome.again for outcome in self.seen.outcomes), Counter[str]()).most_common()

    def show(self) -> None:
        """Print the tables and what broke."""
        console = Console(width=110)
        console.print(self._counts_table(), self._fault_table())
        if again := self._again():
            console.print("Asked again for: " + ", ".join(f"{code} {n}" for code, n in again) + ".")
        if not self.violations:
            console.print("Every accepted edit ended exactly once; nothing leaked.")
            return
        console.print(f"{len(self.violations)} broken promises:")
        for sentence in self.violations[:SHOWN]:
            console.print(f"  - {sentence}", markup=False, highlight=False)

    def _counts_table(self) -> Table:
        table = Table(title=f"chaos, seed {self.seed}, {self.seconds:.0f} s")
        table.add_column("count")
        table.add_column("", justify="right")
        for name, value in self.counts.items():
            table.add_row(name, str(value))
        latency = spread([outcome.latency_s for outcome in self.seen.outcomes])
        table.add_row("latency of an edit, s", _told(latency))
        for kind, one in self.recoveries().items():
            table.add_row(f"whole again after {kind}, s", _told(one))
        return table

    def _fault_table(self) -> Table:
        table = Table(title="faults")
        table.add_column("target")
        for kind in Kind:
            table.add_column(kind.value, justify="right")
        counts = Counter((fault.fault.target, fault.fault.kind) for fault in self.seen.faults)
        for target in TARGETS:
            table.add_row(target, *(str(counts[target, kind]) for kind in Kind))
        return table


def _told(one: DistributionSummary | None) -> str:
    return "-" if one is None else f"p50 {one.p50:.1f}  p95 {one.p95:.1f}  most {one.most:.1f}"


def _rounded(one: DistributionSummary | None) -> dict[str, float] | None:
    return None if one is None else {name: round(value, 3) for name, value in asdict(one).items()}

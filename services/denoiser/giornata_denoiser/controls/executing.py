"""ControlNets of a step's rows, each computed where its row is open: in this process, or at an instance."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from giornata.scheduling.batch import RowKey
from giornata_denoiser.blocks.waits import WaitTimer
from giornata_denoiser.controls.local import LocalControls, costing
from giornata_denoiser.controls.remote import RemoteControls
from giornata_denoiser.engine.controls import ControlLost, ControlNotLoaded, OfSequences
from giornata_denoiser.rows.row import Row


class ControlDispatcher:
    """Satisfies :class:`giornata_denoiser.engine.controls.ControlExecutor`.

    A row that is open at an instance is asked there.

    Either executor may be missing.
    """

    def __init__(self, local: LocalControls | None, remote: RemoteControls | None) -> None:
        self._local, self._remote = local, remote

    def able(self, row: Row) -> Row | None:
        """See :meth:`giornata_denoiser.engine.controls.ControlExecutor.able`: rows wait until they are open.

        One that is computed here meanwhile, or because no instance is left, costs this process what it computes.
        """
        if self._remote is None or not row.adapters.controls:
            return row
        if self._asks(row):
            return costing(row, {})
        if self._local is not None and self._local.has(row):
            return costing(row, self._local.works)
        return None if any(row.adapters.controlling(row.step)) else row

    def residuals(
        self, rows: Sequence[Row], whole: Sequence[bool], waits: WaitTimer
    ) -> tuple[OfSequences, ...]:
        """See :meth:`giornata_denoiser.engine.controls.ControlExecutor.residuals`.

        Instances are asked first, and compute while this process does.
        """
        found: dict[RowKey, OfSequences] = {}
        if self._remote is not None:
            asking = [(row, every) for row, every in zip(rows, whole, strict=True) if self._asks(row)]
            elsewhere = [row for row, _ in asking]
            self._check(rows, {row.key for row in elsewhere})
            asked = self._remote.ask(elsewhere, [every for _, every in asking], waits)
            found |= {row.key: added for row, added in zip(elsewhere, asked, strict=True)}
        here = [n for n, row in enumerate(rows) if row.key not in found and row.adapters.controls]
        if self._local is not None and here:
            made = self._local.compute([rows[n] for n in here], [whole[n] for n in here])
            found |= {rows[n].key: added for n, added in zip(here, made, strict=True)}
        for row in rows:
            if row.key not in found and any(row.adapters.controlling(row.step)):
                raise ControlNotLoaded(f"row {row.key} has ControlNets, and this worker has none")
        return tuple(found.get(row.key, ()) for row in rows)

    def retain(self, keys: Collection[RowKey]) -> None:
        """See :meth:`giornata_denoiser.engine.controls.ControlExecutor.retain`."""
        if self._local is not None:
            self._local.retain(keys)
        if self._remote is not None:
            self._remote.retain(keys)

    def _check(self, rows: Sequence[Row], asked: Collection[RowKey]) -> None:
        """Raise ControlLost where one that can only be asked for has been closed since it was ready."""
        closed = {
            row.key
            for row in rows
            if row.key not in asked and any(row.adapters.controlling(row.step)) and not self._here(row)
        }
        if closed:
            raise ControlLost(closed)

    def _here(self, row: Row) -> bool:
        return self._local is not None and self._local.has(row)

    def _asks(self, row: Row) -> bool:
        return self._remote is not None and self._remote.has(row.key)

"""LoRAs that arrive while their rows run: when a row may make a step, and when they begin to act. Pure.

"Katz: Efficient Workflow Serving for Diffusion Models with Many Adapters", ATC '25, §6: a row begins without its LoRAs
and takes them at the first step boundary after they are loaded. Here the step is bounded, and a row that does not want
that waits.
"""

from __future__ import annotations

from dataclasses import replace

from giornata_denoiser.engine.low_ranks import LowRanks
from giornata_denoiser.rows.row import Row


def able(row: Row, low_ranks: LowRanks) -> Row | None:
    """`row` as it makes its next step; None while it has to wait for its LoRAs.

    They act from this step on where they were to act later, may join early and are loaded. What the row has learned of
    its template without them is void then: the step is computed in full and corrects again.
    """
    adapters = row.adapters
    if not adapters.loras:
        return row
    late = row.step < adapters.loras_from
    if late and not adapters.joins_early:
        return row
    if low_ranks.find(adapters.loras) is None:
        return row if late else None
    if not late:
        return row
    return replace(row, adapters=replace(adapters, loras_from=row.step), corrections=None)

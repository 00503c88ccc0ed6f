"""Which rows of a job begin with another row's latent, and which leave theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from giornata.approximate.entries import Hit
from giornata.wire.progress import ApproximateUse, JobRecord, KeptLatent, RowRecord, RowState
from giornata.wire.prompts import PromptEntry


def undecided(rows: Sequence[RowRecord]) -> tuple[RowRecord, ...]:
    """The rows that begin with their own noise, as far as is known."""
    return tuple(row for row in rows if row.resume is None and row.approximate is None)


def begun_with(record: JobRecord, hits: Mapping[int, Hit]) -> JobRecord:
    """A job's record in which rows begin with the latents of `hits`, by index, if nothing was decided yet."""
    pending = {row.index for row in record.pending_rows}
    rows = tuple(begun(row, hits) if row.index in pending else row for row in record.rows)
    return record.model_copy(update={"rows": rows})


def begun(row: RowRecord, hits: Mapping[int, Hit]) -> RowRecord:
    """A row that begins with its hit's latent; itself where it has none, or begins otherwise already."""
    hit = hits.get(row.index)
    if hit is None or not undecided((row,)):
        return row
    use = ApproximateUse(step=hit.step, cosine=round(hit.cosine, 4), entry=hit.entry)
    state = RowState(step=hit.step, latents=hit.latents, another=True)
    return row.model_copy(update={"resume": state, "approximate": use})


def entries(
    before: JobRecord, after: JobRecord, key: str, embedding: bytes, until_s: float
) -> tuple[tuple[PromptEntry, ...], tuple[KeptLatent, ...]]:
    """The entries that an ended job leaves, and the latents of its rows that become none: those that failed.

    `before` is its last record that names what its rows have kept, and `after` its terminal one. A row that began with
    another row's latent has kept nothing, so that pictures do not drift from copy to copy. Without a key
    there are none.
    """
    ended = {row.index for row in after.rows if row.image is not None and row.error is None}
    good = [row for row in before.rows if key and embedding and row.index in ended and row.kept]
    template = "" if before.inspection is None else before.inspection.template_key
    found = tuple(
        PromptEntry(
            entry_id=f"{before.job.job_id}-{row.index}",
            key=key,
            tenant=before.job.tenant,
            template_key=template,
            prompt_embedding=embedding,
            kept=row.kept,
            until_s=until_s,
        )
        for row in good
    )
    return found, tuple(latent for row in before.rows if row not in good for latent in row.kept)

"""A client of the NATS door that asks again by the same key where no answer comes."""

from __future__ import annotations

import asyncio
from typing import Final

import nats.errors

from giornata.client import Client, Edit
from giornata.wire.errors import DeadlineExceeded, GiornataError, Overloaded
from giornata.wire.jobs import Priority
from giornata_lab.rehearsals.chaos.edits import EditVariant
from giornata_lab.rehearsals.chaos.look import Records
from giornata_lab.rehearsals.chaos.outcomes import Outcome
from giornata_lab.rehearsals.chaos.rest import MAX_PAUSE_S, PAUSE_S

ANSWER_S: Final = 20.0
"""How long acceptance, and then the answer, is waited for before the same is asked again."""


async def carry(
    client: Client, records: Records, variant: EditVariant, outcome: Outcome, budget_s: float
) -> None:
    """An edit from its submission to its end, as the job's record tells it.

    Args:
        client: of the door.
        records: of all jobs.
        variant: what is asked for.
        outcome: is told what happens.
        budget_s: of the job.
    """
    while True:
        outcome.tries += 1
        pause_s = PAUSE_S
        try:
            edit = await _begun(client, variant, outcome, budget_s)
            async with asyncio.timeout(ANSWER_S):
                result = await edit
            outcome.pictures = [picture.data for picture in result.pictures]
        except Overloaded as error:
            outcome.again[error.code] += 1
            pause_s = min(error.retry_after_s or PAUSE_S, MAX_PAUSE_S)
        except (TimeoutError, DeadlineExceeded, nats.errors.Error) as error:
            outcome.again[type(error).__name__] += 1
        except GiornataError as error:
            if not await _ended(records, outcome):
                outcome.unexpected.append(f"nats: {error.code} {error}")
        if outcome.accepted and await _ended(records, outcome):
            return
        await asyncio.sleep(pause_s)


async def _begun(client: Client, variant: EditVariant, outcome: Outcome, budget_s: float) -> Edit:
    fields = dict(variant.fields)
    async with asyncio.timeout(ANSWER_S):
        edit = await client.edit(
            prompt=str(fields.pop("prompt")),
            image=variant.image,
            mask=variant.mask,
            timeout_s=budget_s,
            priority=Priority.BATCH,
            idempotency_key=outcome.edit.key,
            **fields,
        )
    outcome.accepted = True
    outcome.job_ids.add(edit.job_id)
    return edit


async def _ended(records: Records, outcome: Outcome) -> bool:
    """Return whether the record is terminal. What nobody has recorded was not accepted."""
    found = await records.of(outcome.edit.job_id)
    if found is None or not found.state.terminal:
        return False
    outcome.accepted = True
    outcome.record = found
    return True

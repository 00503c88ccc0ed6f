"""Which blobs a job leaves behind that have no more use once it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from giornata.wire.errors import AttemptsExhausted
from giornata.wire.jobs import BlobRef, Encoding, Inspection
from giornata.wire.progress import JobRecord


def leftovers(record: JobRecord, made: Iterable[BlobRef]) -> tuple[BlobRef, ...]:
    """What is to be deleted of a job with a terminal `record`; `made` is what its stages made besides.

    A blob is the job's own if its key lies in one of the job's folders. Template pictures, uploads of applications and
    the empty prompt lie elsewhere. Delivered pictures stay, and the inputs of a job in quarantine.
    """
    job = record.job
    delivered = {row.image.key for row in record.rows if row.image is not None}
    found = [ref for ref in (*of_record(record), *made) if ref.key.startswith(f"{job.job_id}/")]
    if record.error is None or record.error.code != AttemptsExhausted.code:
        found += [ref for ref in job.pictures if ref.key.startswith(job.upload_folder)]
    by_key = {ref.key: ref for ref in found if ref.key not in delivered}
    return tuple(by_key.values())


def of_inspection(inspection: Inspection) -> tuple[BlobRef, ...]:
    """The blobs of an inspection."""
    made = (inspection.prepared, inspection.references, inspection.controls, inspection.alpha)
    return tuple(ref for ref in made if ref is not None)


def of_encoding(encoding: Encoding) -> tuple[BlobRef, ...]:
    """The blobs of an encoding that are the job's alone."""
    shared = (encoding.text,) if encoding.references is None else (encoding.text, encoding.references)
    return *shared, *encoding.controls, *encoding.rows


def of_record(record: JobRecord) -> Iterator[BlobRef]:
    """The blobs that a record names, but for the job's inputs and pictures."""
    if record.inspection is not None:
        yield from of_inspection(record.inspection)
    if record.encoding is not None:
        yield from of_encoding(record.encoding)
    for row in record.rows:
        if row.latents is not None:
            yield row.latents
        if row.resume is not None:
            yield row.resume.latents

"""Which blobs a job may take along when it ends."""

from __future__ import annotations

import pytest

from giornata.wire.errors import AttemptsExhausted, GiornataError, InternalError
from giornata.wire.jobs import BlobRef, JobRecord, JobState, RowRecord, RowState
from giornata_router.job_records import leftovers
from tests.contract.messages import ENCODING, INSPECTION, JOB


def ref(key: str) -> BlobRef:
    return BlobRef(key=key, size_bytes=1, sha256="")


def own(name: str) -> BlobRef:
    return ref(f"{JOB.job_id}/{name}")


def record(image: str, error: GiornataError | None = None) -> JobRecord:
    uploads = [ref(f"{JOB.upload_folder}x/{name}") for name in ("mask", "reference_0", "control_image_0")]
    job = JOB.model_copy(
        update={
            "image": ref(image),
            "mask": uploads[0],
            "references": (uploads[1],),
            "control_images": (uploads[2],),
        }
    )
    made = JobRecord(job=job, state=JobState.FAILED, error=error.body() if error else None)
    return made.model_copy(
        update={
            "inspection": INSPECTION.model_copy(
                update={
                    "prepared": own("prepared"),
                    "alpha": own("alpha"),
                    "references": own("seen"),
                    "controls": own("annotated"),
                }
            ),
            "encoding": ENCODING.model_copy(
                update={
                    "text": own("text"),
                    "rows": (own("row"),),
                    "references": own("clean"),
                    "controls": (own("control"),),
                    "empty_text": ref("shared/p/empty-text"),
                }
            ),
        }
    )


def keys(found: JobRecord, *made: BlobRef) -> set[str]:
    return {ref.key for ref in leftovers(found, made)}


STAGES = {
    own(name).key for name in ("prepared", "alpha", "seen", "annotated", "text", "clean", "control", "row")
}
MASK = f"{JOB.upload_folder}x/mask"
OTHERS = {f"{JOB.upload_folder}x/reference_0", f"{JOB.upload_folder}x/control_image_0"}


def test_the_jobs_own_pictures_go_and_those_of_others_stay() -> None:
    mine = f"{JOB.upload_folder}x/image"
    assert keys(record(mine)) == STAGES | {mine, MASK} | OTHERS
    for shared in (f"{JOB.tenant}/template_1/image", f"{JOB.tenant}/upload_1/image", f"{JOB.tenant}/image"):
        assert keys(record(shared)) == STAGES | {MASK} | OTHERS


def test_a_job_in_quarantine_keeps_its_inputs_for_an_operator() -> None:
    assert keys(record(f"{JOB.upload_folder}x/image", AttemptsExhausted())) == STAGES
    assert MASK in keys(record(f"{JOB.upload_folder}x/image", InternalError()))


@pytest.mark.parametrize("delivered", [True, False])
def test_a_picture_goes_unless_it_is_delivered(delivered: bool) -> None:
    image = own("image-0-a")
    rows = (
        RowRecord(index=0, seed=1, image=image if delivered else None, latents=own("latents-0-b")),
        RowRecord(index=1, seed=2, resume=RowState(step=1, latents=own("latents-1-c"))),
    )
    found = keys(record("").model_copy(update={"rows": rows}), image)
    assert found == STAGES | {MASK, own("latents-0-b").key, own("latents-1-c").key} | OTHERS | (
        set() if delivered else {image.key}
    )

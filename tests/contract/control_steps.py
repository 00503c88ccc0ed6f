"""One of every message that travels on the data path of steps."""

from __future__ import annotations

from pydantic import BaseModel

from giornata.wire.controlnets import (
    CancelStep,
    ControlNetStepFailed,
    DataPath,
    DeviceMemory,
    Dtype,
    LinkOpened,
    OpenLink,
    ResidualReady,
    ResidualsRequest,
    StepCancelled,
)

CONTROL_STEPS: tuple[BaseModel, ...] = (
    OpenLink(
        token="t",  # noqa: S106 - no secret
        path=DataPath.CUDA,
        slab_bytes=4096,
        memory=DeviceMemory(
            device="GPU-0",
            handle=b"h",
            offset_bytes=512,
            counter=b"c",
            counter_offset=1,
            event=b"e",
            event_sync=True,
        ),
    ),
    LinkOpened(),
    ResidualsRequest(
        number=3,
        row="job_1/1/0",
        step=7,
        level=0.25,
        whole=False,
        latents_dtype=Dtype.FLOAT32,
        dtype=Dtype.BFLOAT16,
        offsets=(0, 1024),
        tokens=(4, 2),
        channels=(64, 128),
    ),
    CancelStep(number=3),
    ResidualReady(number=3, index=0),
    ControlNetStepFailed(number=3, code="not_open", message="no such row"),
    StepCancelled(number=3),
)

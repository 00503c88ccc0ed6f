"""The latest step at which a LoRA may join: pictures in which it joins later and later, compared."""

from __future__ import annotations

import asyncio
import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage.metrics import structural_similarity

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, retry_patiently
from giornata.wire import subjects
from giornata.wire.adapters import AskedLora
from giornata.wire.errors import Failed, GiornataError, LoraNotReady, Overloaded, PayloadTooLarge
from giornata.wire.jobs import Priority
from giornata.wire.loras import EVERYONE, LoraRecord, ProfiledLora
from giornata.wire.messages import INLINE_BYTES, EditReply, Picture, ProbeMessage
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, MaskMode, Reuse, evaluations_of
from giornata.wire.resolution import resolve
from giornata_tools.lora_profiler.probes import Probe

# Which steps are tried, and how late a LoRA may join after what was seen. Pure.


Pixels = NDArray[np.uint8]
"""(height, width, 3)."""
LEAST_SSIM: Final = 0.95
"""Mean over the probes, of each picture in its mask's box beside the picture that has the LoRA in every step."""
SURELY: Final = 2.0
"""Standard errors by which the mean exceeds it: of other pictures, the mean is then below it in 2 cases of 100."""
FINE: Final = 5
"""Steps up to which each is tried."""
GROWTH: Final = 1.25
"""Beyond `FINE`, each step that is tried is so many times the one before."""


@dataclass(frozen=True)
class JoinStepTrial:
    """Pictures whose LoRA joined after `step` steps of `steps`."""

    step: int
    steps: int
    ssims: tuple[float, ...]
    """SSIM of each probe, in the mask's box."""

    @property
    def share(self) -> float:
        """Share of the steps after which the LoRA joined."""
        return self.step / self.steps

    @property
    def least(self) -> float:
        """SSIM of the probe that is least alike."""
        return min(self.ssims)

    @property
    def mean(self) -> float:
        """Mean SSIM of the probes."""
        return statistics.fmean(self.ssims)

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 of a single probe, which tells none."""
        n = len(self.ssims)
        return statistics.stdev(self.ssims) / math.sqrt(n) if n > 1 else 0.0

    @property
    def alike(self) -> bool:
        """Return whether pictures are like those with the LoRA in every step, and not by the chance of few probes."""
        return self.mean - SURELY * self.error >= LEAST_SSIM


def candidates(steps: int, at_most: float) -> Iterator[int]:
    """Steps to try, from the first on, none above the share `at_most` of `steps` and none that is the last.

    Every one up to `FINE`, then fewer: a share that lies between two of them is taken for the lower one.
    """
    step = 1
    while step < steps and step <= at_most * steps:
        yield step
        step = step + 1 if step < FINE else max(step + 1, int(step * GROWTH))


def joins_within(tried: Sequence[JoinStepTrial]) -> float:
    """The largest share of the steps up to which all that was `tried`, in rising order, is alike; 0 where none is.

    What is alike again after one that is not is chance, and does not count.
    """
    share = 0.0
    for one in tried:
        if not one.alike:
            break
        share = one.share
    return share


def ssim(one: Pixels, other: Pixels, where: NDArray[np.bool_] | None = None) -> float:
    """Mean structural similarity (Wang et al., 2004; windows of 7 pixels) over `where`, default all."""
    mean, every = structural_similarity(one, other, channel_axis=2, full=True)
    return float(mean if where is None else every[where].mean())


# Pictures of one LoRA: made by the system, compared, and what they say told to the LoRA store.


SHARED_TENANT: Final = "default"
"""On whose behalf LoRAs are probed that are everybody's; it needs no key of its own."""
MESSAGE_BYTES: Final = INLINE_BYTES + (1 << 20)
TOLD_MS: Final = 30_000

Probes = Callable[[ModelCard], Sequence[Probe]]
"""The probes for a model."""
Done = Callable[[int, JoinStepTrial | None], None]
"""Told of each finished edit: how many are done, and what all pictures of a step say once they are there."""


@dataclass(frozen=True)
class ProbeSetting:
    """The options with which every probe is edited."""

    steps: int | None = None
    """None: the model's default."""
    padding_mask_crop: int | None = None
    at_most: float = 0.5
    """Share of the steps beyond which none is tried."""
    in_flight: int = 2
    """Edits at a time."""
    timeout_s: float = 900.0
    """For one edit, waiting included."""


@dataclass(frozen=True)
class LoraProfile:
    """The latest step at which a LoRA may join, and the measurements behind it."""

    record: LoraRecord
    steps: int
    tried: tuple[JoinStepTrial, ...]
    """In rising order; all but the last are alike."""

    @property
    def joins_within(self) -> float:
        """Share of the steps."""
        return joins_within(self.tried)


@dataclass(frozen=True)
class LoraProfiler:
    """Makes pictures by a connection that belongs to the NATS user `profiler`."""

    bus: Bus
    blobs: BlobStore | None
    """For pictures that do not fit into a message."""
    probes: Probes
    setting: ProbeSetting

    async def profile(self, record: LoraRecord, card: ModelCard, done: Done) -> LoraProfile:
        """See how late a ready LoRA of the served model `card` may join, and have the LoRA store keep it.

        Raises:
            LoraNotFound: it was deleted meanwhile.
            LoraNotReady: it is not ready.
            GiornataError: why an edit was refused or failed, or the store could not be told.
        """
        if record.canonical is None:
            raise LoraNotReady(received=str(record.state), accepted="a LoRA that is ready")
        profile = LoraProfile(record, *await self._seen(record, card, done))
        told = ProfiledLora(
            lora_id=record.lora_id,
            tenant=record.tenant,
            sha256=record.canonical.file.sha256,
            model_digest=record.canonical.model_digest,
            joins_within=profile.joins_within,
            remaining_ms=TOLD_MS,
        )
        await self.bus.call(subjects.lora("profiled"), told, LoraRecord, Deadline.after_ms(TOLD_MS))
        return profile

    async def _seen(
        self, record: LoraRecord, card: ModelCard, done: Done
    ) -> tuple[int, tuple[JoinStepTrial, ...]]:
        """Steps of an edit, and what joining later and later does."""
        asked = EditParameters(
            prompt="-",
            model=card.name,
            mask_mode=MaskMode.WHITE,
            mask_blur=0,  # the paste's feather is no work of the LoRA's
            reuse=Reuse.OFF,
            num_inference_steps=self.setting.steps,
            padding_mask_crop=self.setting.padding_mask_crop,
            loras=(AskedLora(id=record.lora_id),),
        )
        steps = evaluations_of(resolve(asked, card, 0), keeps_whole_steps=card.keeps_whole_steps)
        if record.canonical is not None and not record.canonical.modules:
            return steps, ()  # its text encoders' part acts before the first step
        probes = await asyncio.to_thread(self.probes, card)
        count = _ProfileProgress(done)
        whole = await self._edited(record, asked, probes, count)
        tried: list[JoinStepTrial] = []
        for step in candidates(steps, self.setting.at_most):
            joining = asked.model_copy(update={"lora_join": step / steps})
            pictures = await self._edited(record, joining, probes, count)
            pairs = zip(probes, whole, pictures, strict=True)
            tried.append(
                JoinStepTrial(step, steps, tuple(ssim(one, other, probe.box) for probe, one, other in pairs))
            )
            count.tell(tried[-1])
            if not tried[-1].alike:
                break
        return steps, tuple(tried)

    async def _edited(
        self, record: LoraRecord, asked: EditParameters, probes: Sequence[Probe], count: _ProfileProgress
    ) -> list[Pixels]:
        """The picture of each probe, some at a time. The first failure is raised once what runs has ended."""
        places = asyncio.Semaphore(self.setting.in_flight)
        pictures: dict[int, Pixels] = {}
        failures: list[GiornataError] = []

        async def edit(probe: Probe) -> None:
            async with places:
                if failures:
                    return
                parameters = asked.model_copy(update={"prompt": probe.prompt, "seed": probe.seed})
                try:
                    pictures[probe.seed] = await self._picture(record, parameters, probe)
                except GiornataError as error:
                    failures.append(error)
                else:
                    count.add()

        # a failure in a group cancels the task that waits for it, which on Python 3.11 stays marked as cancelled
        async with asyncio.TaskGroup() as tasks:
            for probe in probes:
                tasks.create_task(edit(probe), name=f"probe-{probe.name}")
        if failures:
            raise failures[0]
        return [pictures[probe.seed] for probe in probes]

    async def _picture(self, record: LoraRecord, asked: EditParameters, probe: Probe) -> Pixels:
        deadline = Deadline.after_ms(self.setting.timeout_s * 1000)

        async def ask() -> EditReply:
            message = ProbeMessage(
                parameters=asked,
                image=probe.image,
                mask=probe.mask,
                tenant=SHARED_TENANT if record.tenant == EVERYONE else record.tenant,
                priority=Priority.BATCH,
                remaining_ms=deadline.remaining_ms(),
            )
            return await self.bus.call(
                subjects.EDIT_PROBE, message, EditReply, deadline, limit_bytes=MESSAGE_BYTES
            )

        # a full queue is no reason to begin with the first picture again
        reply: EditReply = await retry_patiently(Overloaded, self.setting.timeout_s)(ask)
        if not reply.pictures:
            raise Failed("; ".join(reply.errors))
        _check_step(reply.pictures[0], asked)
        with Image.open(io.BytesIO(await self._file(reply.pictures[0]))) as opened:
            pixels = np.asarray(opened.convert("RGB"))
        if pixels.shape[:2] != probe.box.shape:
            raise Failed(
                f"The picture of {probe.name} has another size than the probe.",
                received=f"{pixels.shape[1]}x{pixels.shape[0]} pixels",
                accepted=f"{probe.box.shape[1]}x{probe.box.shape[0]}",
            )
        return pixels

    async def _file(self, picture: Picture) -> bytes:
        if picture.data is not None:
            return picture.data
        if picture.ref is None or self.blobs is None:
            raise PayloadTooLarge("A picture is too large to travel over NATS.", accepted="--blobs")
        return await self.blobs.get(picture.ref)


@dataclass
class _ProfileProgress:
    """Finished edits."""

    done: Done
    edits: int = 0

    def add(self) -> None:
        self.edits += 1
        self.done(self.edits, None)

    def tell(self, tried: JoinStepTrial) -> None:
        self.done(self.edits, tried)


def _check_step(picture: Picture, asked: EditParameters) -> None:
    """Refuse to compare a picture whose LoRA joined elsewhere than it was to: a worker of an older version."""
    late, wanted = bool(picture.loras_from), asked.lora_join is not None
    if picture.loras_from is None or late is not wanted:
        raise Failed(
            "A denoiser did not let the LoRA join where the request says.",
            received=f"from step {picture.loras_from}",
            accepted=f"after a share of {asked.lora_join or 0:g} of the steps",
        )

"""The bodies of A1111's answers, made from job records, cards and LoRAs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import RootModel

from giornata import __version__
from giornata.wire.adapters import ControlCard
from giornata.wire.jobs import JobRecord, JobState, PromptTokens
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.messages import JobEstimate
from giornata.wire.models import ModelCard, Sampler
from giornata_gateway.rules.a1111_forms import hash_of, names_of, title_of
from giornata_gateway.rules.a1111_parameters import AUTOMATIC, NAMES, taken
from giornata_gateway.views.answers import PictureError, View, error_detail, usage_of
from giornata_gateway.views.jobs import job_view


class PaintedAnswer(View):
    """Answer of ``txt2img`` and ``img2img``."""

    images: list[str]
    """PNG as base64."""
    parameters: dict[str, Any]
    """The request without its pictures."""
    info: str
    """JSON: :class:`PaintedInfo`."""


class PaintedInfo(View):
    """The parameters with which pictures were made, in A1111's names."""

    prompt: str
    all_prompts: list[str]
    negative_prompt: str
    all_negative_prompts: list[str]
    seed: int
    all_seeds: list[int]
    width: int
    height: int
    sampler_name: str
    cfg_scale: float
    steps: int
    batch_size: int
    sd_model_name: str
    sd_model_hash: str
    denoising_strength: float | None
    index_of_first_image: Literal[0] = 0
    infotexts: list[str]
    job_timestamp: str
    version: str
    job_id: str
    """The job's id in Giornata: `/v1/jobs` tells more of it."""
    errors: list[PictureError]
    """Why pictures are missing, where others were made."""
    prompt_tokens: PromptTokens | None
    negative_prompt_tokens: PromptTokens | None
    """How many tokens the prompts have, and how many were read; null where that is not known."""


class ProgressState(View):
    """`state` of a progress."""

    skipped: bool = False
    interrupted: bool = False
    stopping_generation: bool = False
    job: str = ""
    """The job's id; empty while there is none."""
    job_count: int = 0
    """The tenant's jobs in progress at this gateway."""
    job_timestamp: str = "0"
    job_no: int = 0
    sampling_step: int = 0
    sampling_steps: int = 0


class ProgressView(View):
    """Answer of ``GET /sdapi/v1/progress``: the oldest of the tenant's jobs."""

    progress: float = 0.0
    """0 to 1."""
    eta_relative: float = 0.0
    """Seconds until its pictures should be there; 0 where that is not known."""
    state: ProgressState = ProgressState()
    current_image: None = None
    """Always null."""
    textinfo: None = None
    current_task: str | None = None


class StableDiffusionModel(View):
    """A served model."""

    title: str
    """What `sd_model_checkpoint` names it by; its `model_name` and its hash do, too."""
    model_name: str
    hash: str
    sha256: str
    filename: str
    config: None = None


class StableDiffusionModels(RootModel[list[StableDiffusionModel]]):
    """Answer of ``GET /sdapi/v1/sd-models``: by name."""


class SamplerItem(View):
    """A sampler that some served model takes."""

    name: str
    aliases: list[str]
    options: dict[str, str]
    """`scheduler`: what `automatic` stands for."""


class SamplerItems(RootModel[list[SamplerItem]]):
    """Answer of ``GET /sdapi/v1/samplers``: by name."""


class SchedulerItem(View):
    """Noise levels that some served model takes."""

    name: str
    label: str
    aliases: None = None
    default_rho: float = -1.0
    need_inner_model: bool = False


class SchedulerItems(RootModel[list[SchedulerItem]]):
    """Answer of ``GET /sdapi/v1/schedulers``."""


class ControlModels(View):
    """Answer of ``GET /controlnet/model_list``: what `model` of a unit names."""

    model_list: list[str]


class LoraItem(View):
    """A LoRA that the tenant may use."""

    name: str
    """What a prompt calls it; `alias` does, too."""
    alias: str
    path: str
    metadata: dict[str, str]


class LoraItems(RootModel[list[LoraItem]]):
    """Answer of ``GET /sdapi/v1/loras``: the newest first."""


class Options(View):
    """The options that hold for requests which override nothing."""

    sd_model_checkpoint: str | None
    """The model's title; null where several are served, and requests name one."""
    sd_checkpoint_hash: str | None
    samples_format: Literal["png"] = "png"


class Nothing(View):
    """An empty answer."""


def painted(
    record: JobRecord, pictures: Sequence[bytes], parameters: Mapping[str, Any], created: float
) -> PaintedAnswer:
    """The answer of a completed job: its pictures, encoded; `created` is the Unix time in seconds."""
    return PaintedAnswer(
        images=[base64.b64encode(picture).decode() for picture in pictures],
        parameters=dict(parameters),
        info=_info(record, created).model_dump_json(),
    )


def _info(record: JobRecord, created: float) -> PaintedInfo:
    job, asked = record.job, record.job.parameters
    seeds = [row.seed for row in record.images]
    prompts, negative = [asked.prompt] * len(seeds), asked.negative_prompt or ""
    width, height = (
        (record.inspection.output_width, record.inspection.output_height) if record.inspection else (0, 0)
    )
    tokens = usage_of(record, 0).input_tokens_details
    scales = (job.cfg_scale, asked.guidance_scale)
    scale = next((scale for scale in scales if scale is not None), 1.0)
    info = PaintedInfo(
        prompt=asked.prompt,
        all_prompts=prompts,
        negative_prompt=negative,
        all_negative_prompts=[negative] * len(seeds),
        seed=seeds[0],
        all_seeds=seeds,
        width=width,
        height=height,
        sampler_name=NAMES[asked.sampler or Sampler.EULER].name,
        cfg_scale=scale,
        steps=asked.num_inference_steps or job.denoising_steps,
        batch_size=asked.n,
        sd_model_name=job.model,
        sd_model_hash=job.model_digest[:10],
        denoising_strength=asked.strength if job.image is not None else None,
        infotexts=[],
        job_timestamp=_stamp(created),
        version=f"giornata {__version__}",
        job_id=job.job_id,
        errors=[
            PictureError(index=row.index, error=error_detail(row.error)) for row in record.rows if row.error
        ],
        prompt_tokens=tokens.prompt_tokens,
        negative_prompt_tokens=tokens.negative_prompt_tokens,
    )
    return info.model_copy(update={"infotexts": [_infotext(info, seed) for seed in seeds]})


def _infotext(info: PaintedInfo, seed: int) -> str:
    """A picture's parameters in the lines that A1111 writes into its files."""
    negative = f"\nNegative prompt: {info.negative_prompt}" if info.negative_prompt else ""
    shown = {
        "Steps": info.steps,
        "Sampler": info.sampler_name,
        "CFG scale": f"{info.cfg_scale:g}",
        "Seed": seed,
        "Size": f"{info.width}x{info.height}",
        "Model hash": info.sd_model_hash,
        "Model": info.sd_model_name,
        "Denoising strength": info.denoising_strength,
    }
    return f"{info.prompt}{negative}\n" + ", ".join(
        f"{name}: {value}" for name, value in shown.items() if value is not None
    )


def progress(records: Sequence[JobRecord], forecast: JobEstimate | None, now: float) -> ProgressView:
    """Return how far the first of a tenant's jobs is, by a `forecast` of it; `now` is the Unix time in seconds."""
    if not records:
        return ProgressView()
    record = records[0]
    view, job = job_view(record, "", forecast), record.job
    steps = job.denoising_steps * max(1, len(record.rows))
    done = sum(picture.step or 0 for picture in view.pictures)
    share = done / steps if record.state is JobState.RUNNING else float(record.state is JobState.FINISHING)
    return ProgressView(
        progress=share,
        eta_relative=view.predicted_finish_s or 0.0,
        state=ProgressState(
            interrupted=record.cancel,
            job=job.job_id,
            job_count=len(records),
            job_timestamp=_stamp(now),
            sampling_step=view.step or 0,
            sampling_steps=job.denoising_steps,
        ),
        current_task=job.job_id,
    )


def models(cards: Mapping[str, ModelCard]) -> StableDiffusionModels:
    """Served models."""
    listed = [
        StableDiffusionModel(
            title=title_of(card), model_name=name, hash=hash_of(card), sha256=card.digest, filename=name
        )
        for name, card in sorted(cards.items())
    ]
    return StableDiffusionModels(listed)


def samplers(cards: Mapping[str, ModelCard]) -> SamplerItems:
    """The samplers that the served models take, each once."""
    listed = {named.name: named for card in cards.values() for named in taken(card) if named.automatic}
    items = [
        SamplerItem(
            name=name,
            aliases=[sampler for sampler, other in NAMES.items() if other.name == name],
            options={"scheduler": named.scheduler},
        )
        for name, named in sorted(listed.items())
    ]
    return SamplerItems(items)


def schedulers(cards: Mapping[str, ModelCard]) -> SchedulerItems:
    """The noise levels that the served models take, each once."""
    listed = {named.scheduler for card in cards.values() for named in taken(card)}
    return SchedulerItems(
        [SchedulerItem(name=name, label=name.title()) for name in (AUTOMATIC, *sorted(listed))]
    )


def control_models(controlnets: Mapping[str, Sequence[ControlCard]]) -> ControlModels:
    """The served ControlNets by name, each once."""
    listed = {f"{card.name} [{card.digest[:8]}]" for cards in controlnets.values() for card in cards}
    return ControlModels(model_list=sorted(listed))


def loras(records: Iterable[LoraRecord]) -> LoraItems:
    """LoRAs that are ready."""
    listed = [
        LoraItem(
            name=names_of(record)[0],
            alias=record.lora_id,
            path=record.shared_path or record.lora_id,
            metadata={"model": record.model or ""},
        )
        for record in records
        if record.state is LoraState.READY
    ]
    return LoraItems(listed)


def options(cards: Mapping[str, ModelCard]) -> Options:
    """Return what stands in place of A1111's settings."""
    only = next(iter(cards.values())) if len(cards) == 1 else None
    return Options(
        sd_model_checkpoint=title_of(only) if only else None, sd_checkpoint_hash=only.digest if only else None
    )


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%d%H%M%S")

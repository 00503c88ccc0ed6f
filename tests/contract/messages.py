"""One of every message that travels between processes, with every kind of field filled."""

from __future__ import annotations

from pydantic import BaseModel

from giornata.families import Family
from giornata.wire.adapters import ControlKind
from giornata.wire.blocks import BlockSpec
from giornata.wire.controlnets import CloseControl, Closed, ControlBase, DataPath, OpenControl, Opened
from giornata.wire.devices import HostDevice
from giornata.wire.errors import ErrorBody
from giornata.wire.events import DenoisedEvent, DoneEvent, PreviewEvent, StateEvent, StepEvent
from giornata.wire.host_tiers import (
    AskTier,
    BringFile,
    Brought,
    HostTier,
    TierChange,
    TierLoads,
    TierSnapshot,
    WantedFiles,
    packed,
)
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, JobState, Priority
from giornata.wire.loras import (
    BeginUpload,
    Canonical,
    DropUpload,
    FilePiece,
    FinishUpload,
    KeepUpload,
    LoraCounters,
    LoraRecord,
    LoraState,
    LoraStyle,
    NormaliseLora,
    PinLora,
    ProfiledLora,
    ReadFile,
    Received,
    RemoveLora,
    StoredFile,
    UploadPiece,
)
from giornata.wire.messages import (
    Accepted,
    CancelMessage,
    CancelRows,
    EditMessage,
    EditReply,
    EncodeRequest,
    Epoch,
    FinishReply,
    FinishRequest,
    Forecast,
    ForecastRequest,
    GenerateMessage,
    InspectRequest,
    LoadLoras,
    Picture,
    PrefetchTemplate,
    ProbeMessage,
    RecordRequest,
    RemoveTemplate,
    RunAnswer,
    RunReply,
    RunRequest,
    SubmitRequest,
    TemplateRequest,
)
from giornata.wire.models import ModelCard, Task
from giornata.wire.progress import ApproximateUse, JobRecord, KeptLatent, RowRecord, RowState, TemplateUse
from giornata.wire.prompts import PromptEntry
from giornata.wire.queues import CostFit, PromptCounters, QueueState
from giornata.wire.requests import Approximate, EditParameters, GenerationParameters, OutputFormat, Reuse
from giornata.wire.samplers import Sampler
from giornata.wire.step_caches import StepCache
from giornata.wire.templates import TemplateInputs, TemplateRecord, TemplateState
from giornata.wire.values import CellMap, StageTimes
from giornata.wire.workers import (
    DegreeCosts,
    RankPhase,
    RankState,
    RowProgress,
    ServiceName,
    ServiceState,
    StepSample,
    TemplateCounters,
    WorkerCosts,
    WorkerState,
)
from tests.contract.control_steps import CONTROL_STEPS

REF = BlobRef(key="t/j/image", size_bytes=3, sha256="ab")
PARAMETERS = EditParameters(
    prompt="a red star",
    model="tiny",
    seed=7,
    num_inference_steps=4,
    strength=1.0,
    sampler=Sampler.EULER,
    padding_mask_crop=8,
    partial_images=2,
    reuse=Reuse.STRICT,
    approximate=Approximate.AUTO,
    step_cache=StepCache.TAYLORSEER,
    step_cache_interval=5,
    step_cache_order=1,
    step_cache_warmup=3,
    halo=2,
)
JOB = Job(
    job_id="job_1",
    tenant="default",
    gateway="gateway-1",
    priority=Priority.BATCH,
    model="tiny",
    model_digest="dd",
    parameters=PARAMETERS,
    image=REF,
    template_id="template_1",
    budget_ms=1000,
    result_ttl_s=60,
    weight=2.0,
    fingerprint="ff.ee.dd",
    evaluations=4,
)
INSPECTION = Inspection(
    width=64,
    height=48,
    has_alpha=False,
    model_width=64,
    model_height=48,
    output_width=64,
    output_height=48,
    tokens=12,
    compute_tokens=4,
    mask_ratio=0.25,
    compute_set={1: CellMap(height=3, width=4, bits=b"\xee\xe0")},
    template_key="tt",
    mask_key="mm",
    mask_whole=True,
    prepared=REF,
    alpha=REF,
    crop=(8, 4, 48, 40),
)
ENCODING = Encoding(
    text=REF, text_tokens=48, padding_tokens=40, rows=(REF,), empty_text=REF, prompt_embedding=b"\x00\x3c"
)
STORED = StoredFile(sha256="ab", size_bytes=6)
LORA = LoraRecord(
    lora_id="lora_1",
    tenant="default",
    created_s=1,
    state=LoraState.READY,
    model="tiny",
    name="rims",
    received_bytes=6,
    source=STORED,
    style=LoraStyle.KOHYA,
    rank=4,
    canonical=Canonical(file=STORED, model_digest="dd", rank=4, modules=2, text_modules=1, weights=96),
    joins_within=0.25,
    worker="l1",
    worked_s=2,
    shared_path="tiny/rims.safetensors",
)
BASE = ControlBase(
    kind=ControlKind.FLUX,
    channels=(64, 64, 64),
    singles=1,
    latent_channels=64,
    token_pixels=16,
    text_channels=32,
    pooled_channels=24,
)
ROW = RowRecord(
    index=0,
    seed=7,
    resume=RowState(step=2, latents=REF, another=True),
    template=TemplateUse.HIT,
    approximate=ApproximateUse(step=2, cosine=0.96, entry="j0-0"),
    kept=(KeptLatent(step=4, latents=REF),),
)
CARD = ModelCard(
    name="tiny",
    family=Family.FLUX_FILL,
    digest="dd",
    vae_scale_factor=8,
    mask_grain=8,
    latent_channels=16,
    max_text_tokens=48,
    takes_guidance=True,
    takes_true_cfg=False,
    default_steps=50,
    default_guidance_scale=30.0,
    default_strength=1.0,
    tasks=(Task.EDIT, Task.GENERATE),
    generation_guidance_scale=3.5,
    generation_steps=28,
)
TEMPLATE = TemplateRecord(
    template_id="template_1",
    tenant="default",
    model="tiny",
    model_digest="dd",
    size="128x96",
    image=REF,
    created_s=1_700_000_000,
    expires_s=1_700_604_800,
    state=TemplateState.RECORDING,
    width=64,
    height=48,
    template_key="tt",
    worker="d1",
    size_bytes=512,
    error=ErrorBody(code="row_poisoned", message="not finite"),
)
INPUTS = TemplateInputs(inspection=INSPECTION, empty_text=REF, conditioning=REF)
WORKER = WorkerState(
    capacity_rows=8,
    capacity_tokens=4096,
    running=(
        RowProgress(
            job_id="job_1",
            attempt=1,
            index=0,
            step=2,
            steps=4,
            tokens=12,
            companion_tokens=12,
            padding_tokens=40,
            encoded=True,
            degree=2,
            due_ms=-12.5,
        ),
    ),
    steps_total=9,
    templates=TemplateCounters(
        hits_memory=1,
        hits_disk=2,
        misses=3,
        prefetched=4,
        evicted_memory=5,
        evicted_disk=6,
        recorded=7,
        failed=8,
        memory_bytes=9,
        disk_bytes=10,
        corrected=11,
        corrections_bytes=12,
        hits_first=13,
        first=14,
        first_bytes=15,
    ),
    resident={},
    samples=(
        StepSample(
            rows=1,
            degree=2,
            halves=True,
            sequences=1,
            image_tokens=12,
            text_tokens=48,
            projected_tokens=6,
            attention_pairs=3600,
            calls=2,
            linear=1.5e6,
            attention=2.5e5,
            convolution=5e5,
            gathered=4096.0,
            loaded_bytes=4096,
            assemble_ms=0.25,
            step_ms=5.5,
            predicted_ms=5.25,
            reusing_ms=4.5,
            excess_ms=0.75,
        ),
    ),
    blocks=(
        BlockSpec(
            heads=2, parts={"key": 64, "value": 64}, linear=12.0, text=12.0, outside=2.0, pair=2.0, count=3
        ),
        BlockSpec(
            parts={"border": 28}, across=1.0, text_pair=2.0, convolution=9.0, gathered=36.0, together=True
        ),
    ),
    cost_model=WorkerCosts(
        compute=CostFit(
            weights=(1.0, 0.5, 0.25, 0.0, 0.0, 0.0), r2=0.75, residual_ms=0.5, samples=9, outliers=1
        ),
        load=CostFit(weights=(0.5, 0.0), r2=0.5, residual_ms=0.25, samples=3, outliers=0),
        degrees=(
            DegreeCosts(
                degree=2,
                halves=True,
                compute=CostFit(
                    weights=(1.5, 0.25, 0.125, 0.0, 0.0, 0.0), r2=0.5, residual_ms=0.5, samples=4, outliers=0
                ),
            ),
        ),
        keeps_padding=True,
    ),
    ranks=(RankState(device="cuda:0", phase=RankPhase.READY, busy=True, starts=2),),
)

MESSAGES: list[BaseModel] = [
    SubmitRequest(job=JOB, remaining_ms=900),
    JobRecord(
        job=JOB,
        state=JobState.RUNNING,
        attempt=1,
        causes=("attempt 1 on d0: the worker fell silent",),
        inspection=INSPECTION,
        encoding=ENCODING,
        rows=(ROW,),
    ),
    RunRequest(
        job=JOB,
        attempt=1,
        inspection=INSPECTION,
        encoding=ENCODING,
        rows=(ROW,),
        remaining_ms=900,
        denoise_within_ms=640.5,
        keep_after=(1, 2),
    ),
    PromptEntry(
        entry_id="j0-0",
        key="kk",
        tenant="default",
        template_key="tt",
        prompt_embedding=b"\x00\x3c",
        kept=(KeptLatent(step=4, latents=REF),),
        until_s=1.5,
    ),
    RunReply(answer=RunAnswer.FULL),
    FinishReply(image=REF, decode_ms=1.5, paste_ms=0.5),
    CancelRows(job_id="job_1", attempt=2),
    JOB,
    Accepted(job_id="job_1"),
    Forecast(position=2, finish_ms=1500.5),
    ForecastRequest(job_id="job_1", remaining_ms=900),
    TEMPLATE,
    INPUTS,
    TemplateRequest(template=TEMPLATE, remaining_ms=900),
    RecordRequest(template=TEMPLATE, inputs=INPUTS, remaining_ms=900),
    PrefetchTemplate(job=JOB, inspection=INSPECTION),
    RemoveTemplate(tenant="default", template_key="tt"),
    InspectRequest(job=JOB, remaining_ms=900),
    INSPECTION,
    EncodeRequest(job=JOB, inspection=INSPECTION, remaining_ms=900),
    ENCODING,
    FinishRequest(job=JOB, inspection=INSPECTION, index=0, latents=REF, remaining_ms=900),
    OpenControl(
        job=JOB,
        attempt=1,
        index=0,
        inspection=INSPECTION,
        encoding=ENCODING,
        base=BASE,
        grid=(3, 4),
        times=(1000.0, 500.0),
        sequences=1,
        acting=((0, 2),),
        computed=CellMap(height=3, width=4, bits=b"\xee\xe0"),
        denoiser="d1",
        host="h",
        paths=(DataPath.UNIX, DataPath.TCP),
        remaining_ms=900,
    ),
    Opened(path=DataPath.UNIX, address="/run/c1.sock", token="t", behind=((0, 0, None),)),  # noqa: S106 - no secret
    CloseControl(job_id="job_1", attempt=1, index=0, remaining_ms=900),
    Closed(was_open=True),
    *CONTROL_STEPS,
    CancelMessage(job_id="job_1", api_key="k"),
    EditReply(
        job_id="job_1",
        width=64,
        height=48,
        output_format=OutputFormat.WEBP,
        pictures=(Picture(index=0, seed=7, data=b"RIFF"), Picture(index=1, seed=8, ref=REF)),
        errors=("Its values are not finite.",),
    ),
    EditMessage(parameters=EditParameters(prompt="x"), image=b"\x89PNG", mask=REF, progress="_INBOX.a"),
    ProbeMessage(parameters=EditParameters(prompt="x"), image=b"\x89PNG", mask=b"\x89PNG", tenant="alice"),
    GenerateMessage(parameters=GenerationParameters(prompt="x", size="64x48"), progress="_INBOX.a"),
    StateEvent(job_id="job_1", state=JobState.PREPARING, attempt=0),
    StepEvent(job_id="job_1", attempt=1, index=0, step=1, steps=4),
    PreviewEvent(
        job_id="job_1",
        attempt=1,
        index=0,
        step=1,
        steps=4,
        partial_image_index=0,
        image=b"\xff\xd8\xff",
        format=OutputFormat.JPEG,
        box=(8, 4, 48, 40),
    ),
    DenoisedEvent(job_id="job_1", attempt=1, worker="d1", denoise_ms=12.5, wait_ms=0.5),
    DoneEvent(
        job_id="job_1", state=JobState.COMPLETED, stage_ms=StageTimes(prepare=1, queue=2, denoise=3, finish=4)
    ),
    ServiceState(
        service=ServiceName.DENOISER,
        instance="d1",
        host="h",
        version="0.1.0",
        ready=True,
        models=(CARD,),
        worker=WORKER,
        queue=QueueState(jobs=1, rows=2, steps=8, wait_ms=1500.0),
        prompts=PromptCounters(hits=3, misses=2, evicted=1, entries=1, size_bytes=512),
        loras=LoraCounters(stored_bytes=6, limit_bytes=2048, uploads=2, finished=1, ready=1, read_bytes=6),
        host_tier=HostTier(
            name="h",
            epoch=7,
            number=2,
            changes=(TierChange(number=2, sha256="ab", size_bytes=6),),
            budget_bytes=2048,
            used_bytes=6,
            loads=TierLoads(demand=1, waited_ms=1.5),
        ),
        claims=(HostDevice(device="cuda:3", id="GPU-8f7d4a5c"),),
        answering=("inspect job_1", "finish job_2 0"),
    ),
    BeginUpload(upload_id="upload_1", tenant="default", remaining_ms=900),
    UploadPiece(upload_id="upload_1", tenant="default", offset=3, data=b"xyz", remaining_ms=900),
    Received(size_bytes=6, limit_bytes=2048),
    FinishUpload(
        upload_id="upload_1", tenant="default", model="tiny", name="rims", file=STORED, remaining_ms=900
    ),
    KeepUpload(upload_id="upload_1", file=STORED, remaining_ms=900),
    DropUpload(upload_id="upload_1", tenant="default", remaining_ms=900),
    ReadFile(sha256="ab", offset=3, size_bytes=3, remaining_ms=900),
    FilePiece(data=b"xyz"),
    RemoveLora(lora_id="lora_1", tenant="default", remaining_ms=900),
    ProfiledLora(
        lora_id="lora_1",
        tenant="default",
        sha256="ab",
        model_digest="dd",
        joins_within=0.25,
        remaining_ms=900,
    ),
    NormaliseLora(lora=LORA, remaining_ms=900),
    PinLora(lora_id="lora_1", tenant="default", pinned=True, remaining_ms=900),
    AskTier(remaining_ms=900),
    TierSnapshot.of("h", 7, 2, [("ab" * 32, 6)]),
    BringFile(file=STORED, ahead=True, remaining_ms=900),
    Brought(loaded=True),
    WantedFiles(epoch=(7, 8), number=3, sha256s=packed(["ab" * 32])),
    LoadLoras(files=(STORED,), epoch=Epoch(7, 8)),
    ErrorBody(
        code="mask_empty",
        message="nothing",
        field="mask",
        received="0 px",
        accepted="some",
        retry_after_s=1.0,
    ),
]

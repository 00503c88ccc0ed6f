"""One of every message that travels between processes, with every kind of field filled."""

from __future__ import annotations

from pydantic import BaseModel

from giornata.families import Family
from giornata.wire import controlnets, jobs, loras, messages, workers
from giornata.wire.adapters import ControlKind
from giornata.wire.errors import ErrorBody
from giornata.wire.models import BlockSpec, ModelCard, Sampler, StepCache, Task
from giornata.wire.requests import EditParameters, GenerationParameters, OutputFormat, Reuse
from giornata.wire.templates import TemplateInputs, TemplateRecord, TemplateState
from giornata.wire.values import CellMap, StageTimes
from tests.contract.control_steps import CONTROL_STEPS

REF = jobs.BlobRef(key="t/j/image", size_bytes=3, sha256="ab")
PARAMETERS = EditParameters(
    prompt="a red star",
    model="tiny",
    seed=7,
    num_inference_steps=4,
    strength=1.0,
    sampler=Sampler.EULER,
    mask_prompt="the hat",
    mask_threshold=0.25,
    max_regions=3,
    mask_blur=4.0,
    padding_mask_crop=8,
    partial_images=2,
    reuse=Reuse.STRICT,
    step_cache=StepCache.TAYLORSEER,
    step_cache_interval=5,
    step_cache_order=1,
    step_cache_warmup=3,
    halo=2,
)
JOB = jobs.Job(
    job_id="job_1",
    tenant="default",
    gateway="gateway-1",
    priority=jobs.Priority.BATCH,
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
INSPECTION = jobs.Inspection(
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
    prepared=REF,
    alpha=REF,
    crop=(8, 4, 48, 40),
)
PROMPT_TOKENS = jobs.PromptTokens(given=60, read=47)
ENCODING = jobs.Encoding(
    text=REF, text_tokens=48, padding_tokens=40, prompt_tokens=PROMPT_TOKENS, rows=(REF,), empty_text=REF
)
STORED = loras.StoredFile(sha256="ab", size_bytes=6)
LORA = loras.LoraRecord(
    lora_id="lora_1",
    tenant="default",
    created_s=1,
    state=loras.LoraState.READY,
    model="tiny",
    name="rims",
    received_bytes=6,
    source=STORED,
    style=loras.LoraStyle.KOHYA,
    rank=4,
    canonical=loras.CanonicalLora(
        file=STORED, model_digest="dd", rank=4, modules=2, text_modules=1, weights=96
    ),
    joins_within=0.25,
    worker="l1",
    worked_s=2,
    shared_path="tiny/rims.safetensors",
)
BASE = controlnets.ControlBase(
    kind=ControlKind.FLUX,
    channels=(64, 64, 64),
    singles=1,
    latent_channels=64,
    token_pixels=16,
    text_channels=32,
    pooled_channels=24,
)
ROW = jobs.RowRecord(
    index=0,
    seed=7,
    resume=jobs.RowState(step=2, latents=REF),
    template=jobs.TemplateUse.HIT,
)
CARD = ModelCard(
    name="tiny",
    family=Family.FLUX_FILL,
    digest="dd",
    vae_scale_factor=8,
    mask_grain=8,
    latent_channels=16,
    max_text_tokens=48,
    max_prompt_tokens=47,
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
WORKER = workers.WorkerState(
    capacity_rows=8,
    capacity_tokens=4096,
    running=(
        workers.RowProgress(
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
    templates=workers.TemplateCounters(
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
        workers.StepSample(
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
    cost_model=workers.WorkerCosts(
        compute=workers.CostFit(
            weights=(1.0, 0.5, 0.25, 0.0, 0.0, 0.0), r2=0.75, residual_ms=0.5, samples=9, outliers=1
        ),
        load=workers.CostFit(weights=(0.5, 0.0), r2=0.5, residual_ms=0.25, samples=3, outliers=0),
        degrees=(
            workers.DegreeCosts(
                degree=2,
                halves=True,
                compute=workers.CostFit(
                    weights=(1.5, 0.25, 0.125, 0.0, 0.0, 0.0), r2=0.5, residual_ms=0.5, samples=4, outliers=0
                ),
            ),
        ),
        keeps_padding=True,
    ),
    ranks=(workers.RankState(device="cuda:0", phase=workers.RankPhase.READY, busy=True, starts=2),),
)

MESSAGES: list[BaseModel] = [
    messages.SubmitRequest(job=JOB, remaining_ms=900),
    jobs.JobRecord(
        job=JOB,
        state=jobs.JobState.RUNNING,
        attempt=1,
        causes=("attempt 1 on d0: the worker fell silent",),
        inspection=INSPECTION,
        encoding=ENCODING,
        rows=(ROW,),
    ),
    messages.RunRequest(
        job=JOB,
        attempt=1,
        inspection=INSPECTION,
        encoding=ENCODING,
        rows=(ROW,),
        remaining_ms=900,
        denoise_within_ms=640.5,
    ),
    messages.RunReply(answer=messages.RunAnswer.FULL),
    messages.FinishReply(image=REF, decode_ms=1.5, paste_ms=0.5),
    messages.CancelRows(job_id="job_1", attempt=2),
    JOB,
    messages.JobAck(job_id="job_1"),
    messages.JobEstimate(position=2, finish_ms=1500.5),
    messages.JobEstimateRequest(job_id="job_1", remaining_ms=900),
    TEMPLATE,
    INPUTS,
    messages.TemplateRequest(template=TEMPLATE, remaining_ms=900),
    messages.RecordRequest(template=TEMPLATE, inputs=INPUTS, remaining_ms=900),
    messages.PrefetchTemplate(job=JOB, inspection=INSPECTION),
    messages.RemoveTemplate(tenant="default", template_key="tt"),
    messages.InspectRequest(job=JOB, remaining_ms=900),
    INSPECTION,
    messages.EncodeRequest(job=JOB, inspection=INSPECTION, remaining_ms=900),
    ENCODING,
    messages.FinishRequest(job=JOB, inspection=INSPECTION, index=0, latents=REF, remaining_ms=900),
    controlnets.OpenControl(
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
        paths=(controlnets.DataPath.UNIX, controlnets.DataPath.TCP),
        remaining_ms=900,
    ),
    controlnets.OpenControlReply(
        path=controlnets.DataPath.UNIX,
        address="/run/c1.sock",
        token="t",  # noqa: S106 - no secret
        behind=((0, 0, None),),
    ),
    controlnets.CloseControl(job_id="job_1", attempt=1, index=0, remaining_ms=900),
    controlnets.CloseControlReply(was_open=True),
    *CONTROL_STEPS,
    messages.CancelMessage(job_id="job_1", api_key="k"),
    messages.EditReply(
        job_id="job_1",
        width=64,
        height=48,
        output_format=OutputFormat.WEBP,
        pictures=(
            messages.Picture(index=0, seed=7, data=b"RIFF"),
            messages.Picture(index=1, seed=8, ref=REF),
        ),
        errors=("Its values are not finite.",),
        prompt_tokens=PROMPT_TOKENS,
    ),
    messages.EditMessage(
        parameters=EditParameters(prompt="x"), image=b"\x89PNG", mask=REF, progress="_INBOX.a"
    ),
    messages.ProbeMessage(
        parameters=EditParameters(prompt="x"), image=b"\x89PNG", mask=b"\x89PNG", tenant="alice"
    ),
    messages.GenerateMessage(parameters=GenerationParameters(prompt="x", size="64x48"), progress="_INBOX.a"),
    messages.MaskMessage(
        parameters=messages.MaskParameters(prompt="the hat", max_regions=3), image=REF, api_key="k"
    ),
    messages.MaskMessageReply(
        width=64,
        height=48,
        regions=(messages.MaskedRegion(score=0.75, box=(8, 4, 16, 12), area=150, ref=REF),),
        threshold=0.25,
        model="clipseg",
        data=b"\x89PNG",
    ),
    messages.StateEvent(job_id="job_1", state=jobs.JobState.PREPARING, attempt=0),
    messages.StepEvent(job_id="job_1", attempt=1, index=0, step=1, steps=4),
    messages.PreviewEvent(
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
    messages.DenoisedEvent(job_id="job_1", attempt=1, worker="d1", denoise_ms=12.5, wait_ms=0.5),
    messages.DoneEvent(
        job_id="job_1",
        state=jobs.JobState.COMPLETED,
        stage_ms=StageTimes(prepare=1, queue=2, denoise=3, finish=4),
    ),
    messages.MaskRequest(
        image=REF,
        prompt="the hat",
        threshold=0.25,
        max_regions=3,
        folder="t/j/x/",
        ttl_s=60,
        each=True,
        remaining_ms=900,
    ),
    messages.MaskReply(
        width=64,
        height=48,
        regions=(messages.FoundRegion(score=0.75, box=(8, 4, 16, 12), area=150, mask=REF),),
        mask=REF,
        threshold=0.25,
        model="clipseg",
        compute_ms=12.5,
    ),
    workers.FleetSummary(
        router="r1",
        ready={workers.ServiceName.PREPOST: 1},
        models=(CARD,),
        masks={"tiny": messages.MaskCard(name="clipseg", threshold=0.5)},
        wait_ms={"tiny": 20.0},
    ),
    workers.ServiceState(
        service=workers.ServiceName.DENOISER,
        masks=messages.MaskCard(name="clipseg", threshold=0.5),
        instance="d1",
        host="h",
        version="0.1.0",
        ready=True,
        models=(CARD,),
        worker=WORKER,
        queue=workers.QueueState(jobs=1, rows=2, steps=8, wait_ms=1500.0),
        loras=loras.LoraCounters(
            stored_bytes=6, limit_bytes=2048, uploads=2, finished=1, ready=1, read_bytes=6
        ),
        host_tier=loras.HostTier(
            name="h",
            epoch=7,
            number=2,
            changes=(loras.TierChange(number=2, sha256="ab", size_bytes=6),),
            budget_bytes=2048,
            used_bytes=6,
            loads=loras.TierLoads(demand=1, waited_ms=1.5),
        ),
        gpus=(workers.HostDevice(device="cuda:3", id="GPU-8f7d4a5c", claimed=True),),
        answering=("inspect job_1", "finish job_2 0"),
        prepost=workers.PrepostState(image_processes=2),
    ),
    loras.BeginUpload(upload_id="upload_1", tenant="default", remaining_ms=900),
    loras.UploadChunk(upload_id="upload_1", tenant="default", offset=3, data=b"xyz", remaining_ms=900),
    loras.UploadProgress(size_bytes=6, limit_bytes=2048),
    loras.FinishUpload(
        upload_id="upload_1", tenant="default", model="tiny", name="rims", file=STORED, remaining_ms=900
    ),
    loras.KeepUpload(upload_id="upload_1", file=STORED, remaining_ms=900),
    loras.DropUpload(upload_id="upload_1", tenant="default", remaining_ms=900),
    loras.ReadFile(sha256="ab", offset=3, size_bytes=3, remaining_ms=900),
    loras.FileChunk(data=b"xyz"),
    loras.RemoveLora(lora_id="lora_1", tenant="default", remaining_ms=900),
    loras.ProfiledLora(
        lora_id="lora_1",
        tenant="default",
        sha256="ab",
        model_digest="dd",
        joins_within=0.25,
        remaining_ms=900,
    ),
    loras.NormaliseLora(lora=LORA, remaining_ms=900),
    loras.PinLora(lora_id="lora_1", tenant="default", pinned=True, remaining_ms=900),
    loras.TierSnapshotRequest(remaining_ms=900),
    loras.TierSnapshot.of("h", 7, 2, [("ab" * 32, 6)]),
    loras.TierLoadRequest(file=STORED, ahead=True, remaining_ms=900),
    loras.TierLoadReply(loaded=True),
    loras.WantedFiles(epoch=(7, 8), number=3, sha256s=loras.packed(["ab" * 32])),
    ErrorBody(
        code="mask_empty",
        message="nothing",
        field="mask",
        received="0 px",
        accepted="some",
        retry_after_s=1.0,
    ),
]

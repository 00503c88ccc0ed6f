"""The settings of a denoiser."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Self

from pydantic import Field, field_validator, model_validator

from giornata.checkpoints import ModelConfig
from giornata.runtime import HOST_SHARE, memory_bytes
from giornata.scheduling.batch import BatchingMode
from giornata_denoiser.choices import BITS, CacheForm, ControlNetExecutor, WeightQuantization
from giornata_denoiser.devices import VARIABLE, claimed_of, parse_devices

if TYPE_CHECKING:
    import torch

FIRST_SHARE: Final = 16
"""What edits leave may take one part in so many of the machine's memory by default."""
LORA_SHARE: Final = 8
"""LoRAs may take one part in so many of the machine's memory by default."""


class TemplatePolicy(StrEnum):
    """The reaction to a template that is missing."""

    BACKGROUND = "background"
    """The edit goes on without it, and the template is recorded beside later ones: :attr:`template_first_mb`."""
    INLINE = "inline"
    """The template is recorded first."""
    OFF = "off"
    """The edit computes everything; what there is serves, and what is registered is recorded."""


class TextReusePolicy(StrEnum):
    """The reuse of prompts' tokens by edits that take from a template."""

    OFF = "off"
    """Nothing: every step computes all of them."""
    PADDING = "padding"
    """Padding is computed with the first step and each step in full; the others take what these made of it."""


class DenoiserConfig(ModelConfig):
    """Configuration of a denoiser."""

    template_policy: TemplatePolicy = Field(
        TemplatePolicy.BACKGROUND, description="What happens where an edit's template has not been recorded."
    )
    template_form: CacheForm = Field(
        CacheForm.KV,
        description="What is recorded: `kv`, keys and values, or `hidden`, half the bytes and slower.",
    )
    template_bits: int = Field(
        4, description="Bits of recorded values: 8, 4, or 0 for those of the model's own dtype."
    )
    template_levels: ClassVar[int | None] = None
    """Noise levels that are recorded; edits take the nearest one. Default 6, of UNets 12."""
    template_memory_mb: int = Field(
        default_factory=lambda: memory_bytes() // HOST_SHARE >> 20,
        ge=0,
        description="Recorded templates in memory, in MiB, least recently used out first; default a quarter of the "
        "machine's memory.",
    )
    template_folder: Path | None = Field(
        None, description="Where recorded templates outlive the process; default nowhere."
    )
    template_disk_mb: int = Field(16_384, ge=0, description="Recorded templates in that folder, in MiB.")
    template_budget_mb: ClassVar[int | None] = None
    """Most of one template, in MiB: it records fewer noise levels, then fewer blocks; default what memory, or the
    folder, holds."""
    template_device_mb: int | None = Field(
        None,
        ge=0,
        description="Of recorded templates on a GPU, beside what running rows take, in MiB; default a quarter of what "
        "the model leaves free.",
    )
    template_ahead_mb: ClassVar[int | None] = None
    """Most that is loaded from templates for later steps, in MiB; default a sixteenth of the machine's memory, on a
    GPU an eighth of what the model leaves free."""
    template_correction: ClassVar[bool] = True
    """An edit's first step computes everything and corrects what the later ones take from the template, unless an
    edit with the same mask has done so before."""
    template_corrections_mb: ClassVar[int] = 512
    """Memory for corrections that later edits with the same mask use, in MiB; with 0 each computes its own."""
    template_first_mb: int = Field(
        default_factory=lambda: memory_bytes() // FIRST_SHARE >> 20,
        ge=0,
        description="Of what edits leave of pictures without a template, which serves the next edits instead of one, "
        "in MiB; default a sixteenth of the machine's memory; with 0 they leave nothing.",
    )

    lora_cache_folder: Path | None = Field(
        None, description="Where LoRAs that were used outlive the process; default a temporary folder."
    )
    lora_folder: Path | None = Field(
        None,
        description="The LoRA store's folder, where this machine has it: files are copied from there, not asked for. "
        "It is only read. Default none.",
    )
    lora_host_folder: Path | None = Field(
        None,
        description="The folder of this machine that a LoRA store fills (the same variable there): files are brought "
        "there and copied from there. It is only read. Default none.",
    )
    lora_disk_mb: int = Field(
        16_384, ge=0, description="LoRAs in that folder, in MiB, least recently used out first."
    )
    lora_memory_mb: int = Field(
        default_factory=lambda: memory_bytes() // LORA_SHARE >> 20,
        ge=0,
        description="LoRAs in memory, in MiB; default an eighth of the machine's memory.",
    )
    lora_device_mb: int = Field(
        2048, ge=0, description="Memory for sets of LoRAs on the device that no row uses now, in MiB."
    )
    lora_file_bytes: int = Field(2 << 30, ge=1 << 10, description="Largest file of a LoRA.")
    lora_loads: ClassVar[int] = 2
    """LoRAs that are loaded at a time."""

    renew_steps: ClassVar[int] = 7
    """An edit without a template computes one step in so many in full, or three where that is more, and the others
    only where its mask is; 0 computes all in full."""
    reuse_text: TextReusePolicy = Field(
        TextReusePolicy.OFF,
        description="`padding`: most steps of edits that reuse take the keys and values that an earlier step made of "
        "their prompts' padding; `off`: every step computes all text tokens.",
    )

    quantize: WeightQuantization = Field(
        WeightQuantization.OFF,
        description="Numbers of the weights of a transformer's blocks on a GPU: `int8` or `float8` halve their bytes; "
        "`off`: the model's dtype. Needs torchao.",
    )
    devices: str = Field(
        "",
        description="Devices that compute steps together, as a pool: cuda:0,cuda:1, or cpu,cpu; a process for each. "
        "cuda,cuda: any two GPUs that are free (`device_claims`). "
        "Default: the one `device`, in this process.",
    )
    decisions_file: Path | None = Field(
        None,
        description="Where a pool writes what it decides, one line of JSON each, for the simulator; default nowhere.",
    )
    capacity_rows: int = Field(
        8, ge=1, le=1024, description="Most rows of one step, and of what is accepted."
    )
    profile: Path | None = Field(
        None,
        description="What steps cost here, as `giornata profile` has measured it; default a few steps at the start.",
    )
    batching: ClassVar[BatchingMode] = BatchingMode.STEP
    """When waiting rows join: at a `step`, or per `request`, when all others have left."""
    step_limit_ms: ClassVar[float | None] = None
    """Rows join while a step is predicted to take no longer; default no limit."""
    memory_mb: int | None = Field(
        None,
        ge=1,
        description="For rows and activations, in MiB; default most of what is free on a GPU, no limit on a CPU.",
    )
    controlnets: str = Field(
        "",
        description="ControlNets that this process computes: NAME=CHECKPOINT, separated by commas; a checkpoint is a "
        "local diffusers folder or a hub id.",
    )
    control_held_steps: ClassVar[int] = 2
    """Where an edit takes what lies outside its mask from elsewhere, what its ControlNets add serves so many steps;
    1 computes them in each. Edits with `reuse=off` always do."""
    control_executor: ClassVar[ControlNetExecutor] = ControlNetExecutor.AUTO
    """Who computes ControlNets that both this process and an instance of the ControlNet service have: `local`,
    `service`, or `auto`, whoever is predicted to hold up the steps less."""
    control_late_s: ClassVar[float] = 10.0
    """An instance whose sample takes longer is given up for the row."""
    control_open_s: ClassVar[float] = 20.0
    """How long a row waits for an instance that takes it."""
    control_slab_mb: int | None = Field(
        None,
        ge=1,
        description="Memory of the data path to each instance, in MiB; default 1024, or a sixteenth of the machine's.",
    )
    trace_file: Path | None = Field(
        None,
        description="Where the latest steps, blocks and loads are written at the end, for Perfetto; default nowhere.",
    )
    capacity_tokens: int = Field(
        65_536, ge=1, description="Most text and image tokens of one step; a larger row runs alone."
    )

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices of a pool, in order; none where this process computes."""
        return parse_devices(self.devices)

    @property
    def gpus_wanted(self) -> int:
        """See :class:`~giornata.checkpoints.DeviceConfig`; of a pool those without a number."""
        return claimed_of(self.devices) if self.devices else super().gpus_wanted

    def own_devices(self) -> tuple[torch.device, ...]:
        """See :class:`~giornata.checkpoints.DeviceConfig`; a pool's leader computes nowhere."""
        return () if self.devices else super().own_devices()

    def seeing_alone(self) -> Self:
        """See :class:`~giornata.checkpoints.DeviceConfig`; a pool's leader shows each rank its own."""
        return self if self.devices else super().seeing_alone()

    @field_validator("devices")
    @classmethod
    def _devices_are_known(cls, value: str) -> str:
        parse_devices(value)
        return value

    @model_validator(mode="after")
    def _free_gpus_are_claimed(self) -> Self:
        if claimed_of(self.devices) and self.device_claims is None:
            raise ValueError(
                f"{VARIABLE} asks for any free GPU, which takes GIORNATA_DEVICE_CLAIMS, a folder that the replicas of "
                "this host share; name it, or number the GPUs"
            )
        return self

    @model_validator(mode="after")
    def _bits_are_known(self) -> Self:
        if self.template_bits not in BITS:
            raise ValueError(f"template_bits must be one of {', '.join(map(str, BITS))}")
        return self

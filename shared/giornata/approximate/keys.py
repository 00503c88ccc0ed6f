"""What two edits must have in common for one to begin with the other's latent: everything but words and seed. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from giornata.wire.jobs import Inspection, Job

FREE: Final = frozenset(
    {
        *("prompt", "seed", "n", "model", "user", "approximate", "slo_ms", "partial_images"),
        *("output_format", "output_compression", "loras", "lora_wait", "controlnets"),
    }
)
"""Parameters that may differ. LoRAs and ControlNets are compared as the gateway has resolved them. Fields that are
added later have to be equal, until they are named here."""
OF_MASKS: Final = frozenset({"mask_mode", "grow_mask", "mask_blur", "padding_mask_crop", "halo", "reuse"})
"""Parameters that mean nothing where the whole picture is made."""


def prompt_key(job: Job, inspection: Inspection) -> str:
    """Digest of tenant, model, adapters with scales, ControlNets, size, schedule, picture and mask.

    Where the whole picture is repainted from noise, or generated, picture and mask do not count.
    """
    asked = job.parameters.model_dump(mode="json")
    whole = job.image is None or (inspection.covered and asked["strength"] == 1)
    left_out = FREE | OF_MASKS if whole else FREE
    told: dict[str, Any] = {
        "tenant": job.tenant,
        "model": [job.model, job.model_digest],
        "parameters": {name: value for name, value in sorted(asked.items()) if name not in left_out},
        "size": [inspection.model_width, inspection.model_height, inspection.tokens],
        "steps": job.denoising_steps,
        "loras": [lora.model_dump(mode="json") for lora in job.loras],
        "controls": [net.model_dump(mode="json") for net in job.controls],
        "control_images": [image.sha256 for image in job.control_images],
        "references": [image.sha256 for image in job.references],
    }
    if not whole:
        mask = job.mask or job.image
        told |= {"picture": inspection.template_key, "mask": mask and mask.sha256}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

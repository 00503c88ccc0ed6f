"""Good bytes for every target, from which fuzzers begin: ``python -m tests.fuzz.seeds`` writes them to the corpora."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgpack
import numpy as np
from safetensors.numpy import save

from giornata import api_keys
from giornata.wire import codec
from giornata.wire.jobs import BlobRef
from giornata.wire.masks import MaskMessage, MaskParameters
from giornata.wire.messages import CancelMessage, EditMessage, GenerateMessage
from giornata.wire.requests import EditParameters, GenerationParameters
from tests.fakes.key_files import keys_of
from tests.unit.prepost.picture_files import RGB, RGBA, chunk, deep_png, saved

CORPORA: Final = Path(__file__).parent / "corpora"

PART: Final = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
TINY: Final = RGB[:6, :8]
TRACE: Final = (
    "timestamp,mask_ratio,steps,template,n,seed,shape,adapters\n0,0.1,4,1,1,7,box,a b\n1.5,,,,,,,-\n"
)

IMAGE: Final = PART.format('image"; filename="a.png', "x") + "--b--\r\n"
A1111: Final = (
    {"prompt": "a <lora:rims:0.5> hat", "negative_prompt": "blue", "seed": -1, "steps": 20, "cfg_scale": 7,
     "width": 512, "height": 512, "sampler_name": "Euler a", "styles": [], "restore_faces": False,
     "override_settings": {"sd_model_checkpoint": "sdxl [5555555555]"}},
    {"prompt": "a hat", "init_images": ["data:image/png;base64,eA=="], "mask": "eA==", "mask_blur": 4,
     "inpainting_fill": 1, "denoising_strength": 0.5, "inpaint_full_res_padding": 32,
     "override_settings": {"sd_model_checkpoint": "tiny"}, "alwayson_scripts": {"ControlNet": {"args": [
         {"model": "outline [0123abcd]", "image": "eA==", "module": "canny", "weight": 0.5, "processor_res": 512}]}}},
    {"sd_model_checkpoint": "tiny", "CLIP_stop_at_last_layers": 1},
)  # fmt: skip
URLS: Final = (
    "https://example.org/hook?a=b",
    "http://10.1.2.3:8080/",
    "https://[2001:db8::1]:443/x",
    "https://[::ffff:10.0.0.1]/",
    "https://user@example.org/#x",
)


def seeds() -> dict[str, list[bytes]]:
    """By target."""
    edit = EditMessage(
        parameters=EditParameters(prompt="a hat", n=2, strength=0.5, slo_ms=5),
        image=BlobRef(key="tenant/a", size_bytes=3, sha256="0" * 64),
        mask=b"mask",
        progress="_INBOX.a.b",
        api_key="gio_x",
    )
    body = {"prompt": "a hat", "n": 2, "seed": 7, "loras": [{"id": "lora_" + "0" * 32, "scale": 0.5}]}
    down, up = np.zeros((2, 4), "f4"), np.zeros((3, 2), "f4")
    noise = {"transformer.a.lora_A.weight": down, "transformer.a.lora_B.weight": up}
    referring = {"prompt": "x", "reference": ["data:image/png;base64,eA=="]}
    transparent = deep_png(TINY.astype(">u2"), 2, chunk(b"tRNS", b"\0" * 6))
    fields = PART.format("prompt", "a hat") + PART.format("n", "2") + PART.format("controlnets", "[]")
    return {
        "form": [
            (fields + PART.format('image"; filename="a.png', "x") + "--b--\r\n").encode(),
            (PART.format("template_id", "template_1") + fields + "--b--\r\n").encode(),
        ],
        "json": [json.dumps(body).encode(), json.dumps(referring).encode()],
        "a1111": [json.dumps(one).encode() for one in A1111],
        "mask": [
            (PART.format("prompt", "the left shoe") + PART.format("max_regions", "2") + IMAGE).encode(),
            (PART.format("prompt", "x") + PART.format("response_format", "image") + IMAGE).encode(),
        ],
        "webhook": [url.encode() for url in URLS],
        "envelope": [
            codec.encode(edit),
            codec.encode(GenerateMessage(parameters=GenerationParameters(prompt="x"), reference=(b"x",))),
            codec.encode(CancelMessage(job_id="job_x")),
            msgpack.packb({"schema": 1, "parameters": {"prompt": "x"}, "template_id": "t"}),
            codec.encode(MaskMessage(parameters=MaskParameters(prompt="x", max_regions=2), image=b"image")),
        ],
        "png": [saved(TINY, "PNG"), saved(RGBA[:6, :8], "PNG"), transparent],
        "jpeg": [saved(TINY, "JPEG"), saved(TINY, "JPEG", progressive=True, quality=20)],
        "webp": [saved(TINY, "WEBP"), saved(RGBA[:6, :8], "WEBP", lossless=True)],
        "safetensors": [save(noise), save(noise, {"format": "pt"})],
        "trace": [b"\0" + TRACE.encode(), b'\1{"timestamp": 0, "adapters": ["a"]}\n{"timestamp": 2, "steps": 3}\n'],
        "keys": [api_keys.render(keys_of({"gio_a": "alice", "gio_b": "bob"})).encode(), b'{"version": 1}'],
    }  # fmt: skip


if __name__ == "__main__":
    for target, found in seeds().items():
        folder = CORPORA / target
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(found):
            (folder / f"seed-{number}").write_bytes(data)

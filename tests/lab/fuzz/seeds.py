"""Good bytes for every target: ``python -m tests.lab.fuzz.seeds`` writes them to the corpora."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgpack
import numpy as np
from safetensors.numpy import save

from giornata import api_keys
from giornata.wire import codec
from giornata.wire.jobs import BlobRef
from giornata.wire.messages import CancelMessage, EditMessage, GenerateMessage, MaskMessage, MaskParameters
from giornata.wire.requests import EditParameters, GenerationParameters
from tests.fakes.key_files import keys_of
from tests.unit.prepost.files import RGB, RGBA, chunk, deep_png, saved

CORPORA: Final = Path(__file__).parent / "corpora"

PART: Final = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
TINY: Final = RGB[:6, :8]
TRACE: Final = (
    "timestamp,mask_ratio,steps,template,n,seed,shape,adapters\n0,0.1,4,1,1,7,box,a b\n1.5,,,,,,,-\n"
)

SIZE: Final = 2 << 20
HEADER: Final = 4 << 20
EMPTY: Final = b'"t%d.lora_A.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
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


def _json() -> dict[str, bytes]:
    names = _names()
    return {
        "lists": b'{"prompt":[' + b"[]," * (SIZE // 3) + b"[]]}",
        "depth": b'{"prompt":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2) + b"}",
        "unknown names": names,
        "names within": b'{"prompt":"x","loras":[' + names + b"]}",
        "a few names within": b'{"prompt":"x","loras":[' + b",".join([names[:2800] + b'"u":0}'] * 8) + b"]}",
        "escapes": b'{"prompt":"' + b"\\u0041" * (SIZE // 6) + b'"}',
        "a number": b'{"prompt":"x","seed":' + b"1" * SIZE + b"}",
        "a fraction": b'{"prompt":"x","guidance_scale":0.' + b"1" * SIZE + b"}",
        "a word": b'{"prompt":"' + b"x" * SIZE + b'"}',
        "a name": b'{"' + b"x" * SIZE + b'":0}',
        "a picture": b'{"prompt":"x","reference":["' + _base64() + b'"]}',
        "a damaged picture": b'{"prompt":"x","reference":["' + _base64()[:-9] + b'=AAAAAAAA"]}',
    }


def _a1111() -> dict[str, bytes]:
    unit = {"model": "outline", "image": _base64().decode()}
    return _json() | {
        "many pictures": b'{"prompt":"x","init_images":[' + b'"eA==",' * (SIZE // 7) + b'"eA=="]}',
        "scripts": b'{"prompt":"x","alwayson_scripts":' + _names() + b"}",
        "settings": b'{"prompt":"x","override_settings":' + _names() + b"}",
        "a unit": json.dumps({"prompt": "x", "alwayson_scripts": {"controlnet": {"args": [unit]}}}).encode(),
        "weights": json.dumps(
            {"prompt": "([a|b" * 790, "override_settings": {"emphasis": "Ignore"}}
        ).encode(),
        "brackets": json.dumps({"prompt": ("(:" + " " * 500 + "[:1" + "<a") * 8}).encode(),
    }


def _form() -> dict[str, bytes]:
    many = PART.format("n", "1").replace("\r\n\r\n", "\r\n" + "X: y\r\n" * 120 + "\r\n")
    return {
        "a preamble": b"\r\n" * (SIZE // 2) + IMAGE.encode(),
        "a line": b"x" * SIZE + IMAGE.encode(),
        "headers": many.encode() * 47 + b"--b--",
        "parts": PART.format("x", "y").encode() * (SIZE // 60) + b"--b--",
        "a field": PART.format("prompt", "x" * SIZE).encode() + b"--b--",
        "an epilogue": IMAGE.encode() + b"\r\n" * (SIZE // 2),
    }


def _envelope() -> dict[str, bytes]:
    fields = {"schema": 1, "parameters": {"prompt": "x"}, "job_id": "x", "image": b"x"}
    head = msgpack.packb(fields | {"x": None})[:-1]
    return {
        "lists": head + b"\xdd" + SIZE.to_bytes(4, "big") + b"\x90" * SIZE,
        "claims": head + b"\xdd\x00\x06\x66\x66" * (SIZE // 5),
        "trees": head + b"\xdc\x00\xff" + (b"\xdc\x00\xff" + b"\xc0" * 255) * (SIZE // 258),
        "names": msgpack.packb({f"u{number}": 0 for number in range(SIZE // 12)}),
        "a word": msgpack.packb(fields | {"parameters": {"prompt": "x" * SIZE}}),
        "a picture": msgpack.packb(fields | {"image": b"x" * (6 << 20)}),
    }


def _png() -> dict[str, bytes]:
    good = saved(TINY, "PNG")
    return {"chunks": good[:33] + chunk(b"teXt", b"") * (SIZE // 12) + good[33:]}


def _jpeg() -> dict[str, bytes]:
    good = saved(RGB[:16, :16], "JPEG", progressive=True)
    scan = good[good.rindex(b"\xff\xda") : -2]
    return {
        "segments": good[:2] + b"\xff\xe1\x00\x02" * (SIZE // 4) + good[2:],
        "padding": good[:2] + b"\xff" * SIZE + good[2:],
        "stuffing": good[:2] + b"\xff\x00" * (SIZE // 2) + good[2:],
        "scans": good[:-2] + scan * (SIZE // len(scan)) + good[-2:],
    }


def _safetensors() -> dict[str, bytes]:
    count = HEADER // 64
    headers = {
        "lists": b'{"a":[' + b"[]," * (HEADER // 3) + b"[]]}",
        "names": b"{" + b",".join(b'"%d":0' % number for number in range(count)) + b"}",
        "notes": b'{"__metadata__":{' + b",".join(b'"%d":""' % number for number in range(4 * count)) + b"}}",
        "tensors": b"{" + b",".join(EMPTY % number for number in range(count)) + b"}",
        "a shape": b'{"a":{"dtype":"F32","shape":['
        + b"1," * (HEADER // 2 - 50)
        + b'1],"data_offsets":[0,0]}}',
    }
    return {name: struct.pack("<Q", len(text)) + text for name, text in headers.items()}


GIANTS: Final[dict[str, Callable[[], dict[str, bytes]]]] = {
    "json": _json,
    "a1111": _a1111,
    "form": _form,
    "mask": _form,
    "webhook": lambda: {
        "a host": b"https://" + b"a." * (SIZE // 2),
        "odd": "https://{}/".format("ß\uff0e" * 990).encode(),
    },
    "envelope": _envelope,
    "png": _png,
    "jpeg": _jpeg,
    "webp": lambda: {
        "chunks": b"RIFF\xff\xff\x7f\0WEBPVP8X\x0a\0\0\0" + bytes(10) + b"JUNK\0\0\0\0" * (SIZE // 8)
    },
    "safetensors": _safetensors,
    "trace": dict,
    "keys": lambda: {"lists": b'{"keys":[' + b"[]," * (SIZE // 24) + b"[]]}"},
}
"""Inputs of mebibytes that once took seconds or gigabytes, or would: by target, each by its name. None is kept."""


def _names() -> bytes:
    return b"{" + b",".join(b'"u%07d":0' % number for number in range(SIZE // 12)) + b"}"


def _base64() -> bytes:
    return base64.b64encode(b"x" * (SIZE // 4 * 3))


if __name__ == "__main__":
    for target, found in seeds().items():
        folder = CORPORA / target
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(found):
            (folder / f"seed-{number}").write_bytes(data)

"""The nodes for ComfyUI against a small gateway that keeps what it is asked; whole ones are those of tests/e2e."""

from __future__ import annotations

import base64
import json
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from giornata.wire.requests import Reuse
from giornata_lab.bench.systems.edit_forms import file, pixels, scene
from tests import comfyui_nodes
from tests.comfyui_nodes import FOLDER, run
from tests.patience import HUNG_S

IMAGE = torch.from_numpy(scene() / 255).float()[None]
MASK = torch.zeros(96, 128)
MASK[20:40, 20:40] = 1
MODEL = {"id": "fill", "tasks": ["edit", "generate"], "controlnets": [{"name": "outline", "modes": 0}]}
LORA = {"id": "lora_" + "0" * 32, "name": "hats", "state": "ready"}
BUSY = {"code": "too_many_requests", "message": "Too many edits."}


class Gateway(ThreadingHTTPServer):
    """Answers as its test says; `asked` are the requests: method, path and body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, bytes]] = []
        self.refusals: list[tuple[int, dict[str, Any]]] = []
        self.gate = threading.Barrier(1)
        self.deleted = threading.Event()
        self.stuck = False
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Gateway
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path, b""))
        self.answer(200, {"data": [LORA] if "loras" in self.path else [MODEL]})

    def do_DELETE(self) -> None:
        self.server.asked.append(("DELETE", self.path, b""))
        self.server.deleted.set()
        self.answer(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.asked.append(("POST", self.path, body))
            refusal = self.server.refusals.pop(0) if self.server.refusals else None
        if refusal is not None:
            self.answer(refusal[0], {"error": refusal[1]})
            return
        self.server.gate.wait(HUNG_S)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.event({"type": "image_edit.progress", "job_id": "job1", "index": 0, "step": 1, "steps": 2})
        if self.server.stuck:
            self.server.deleted.wait(HUNG_S)
            self.event({"type": "error", "error": {"code": "job_cancelled", "message": "It was cancelled."}})
        else:
            picture = base64.b64encode(file(scene())).decode()
            self.event({"type": "image_edit.completed", "job_id": "job1", "index": 0, "b64_json": picture})
        self.wfile.write(b"0\r\n\r\n")

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        data = json.dumps(body).encode()
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def event(self, data: dict[str, Any]) -> None:
        line = b"data: " + json.dumps(data).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    server = Gateway()
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    monkeypatch.setenv("GIORNATA_URL", f"http://127.0.0.1:{server.server_port}")
    comfyui_nodes.load().nodes.gateway._lists.clear()
    yield server
    server.shutdown()
    serving.join()
    server.server_close()


def inputs(name: str) -> dict[str, Any]:
    known = comfyui_nodes.load().NODE_CLASS_MAPPINGS[name].INPUT_TYPES()
    assert known.keys() <= {"required", "optional"}
    return {**known["required"], **known.get("optional", {})}


def edit(**more: Any) -> Any:
    return run("GiornataEdit", **{"image": IMAGE, "mask": MASK, "prompt": "a hat", "seed": 7} | more)


def test_nodes_keep_comfyuis_contract(gateway: Gateway) -> None:
    mappings = comfyui_nodes.load().NODE_CLASS_MAPPINGS
    assert comfyui_nodes.load().NODE_DISPLAY_NAME_MAPPINGS.keys() == mappings.keys()
    types = {"IMAGE", "MASK", "STRING", "INT", "FLOAT", "GIORNATA_LORAS", "GIORNATA_CONTROLNETS"}
    for name, node in mappings.items():
        assert node.CATEGORY == "image/giornata"
        assert set(node.RETURN_TYPES) <= types
        for one in inputs(name).values():
            assert isinstance(one[0], list) or one[0] in types
            if isinstance(one[0], list):
                assert one[1]["default"] == one[0][0]
    assert inputs("GiornataEdit")["reuse"][0] == list(Reuse)
    assert inputs("GiornataEdit")["seed"][1]["max"] == 2**64 - 1, "as ComfyUI's own samplers have it"


def test_lists_are_the_gateways_and_outlive_it(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = ("GiornataEdit", "model"), ("GiornataControlNet", "controlnet"), ("GiornataLora", "lora")
    expected = [["(not set)", "fill"], ["(not set)", "outline"], ["(not set)", f"hats {LORA['id']}"]]
    assert [inputs(node)[name][0] for node, name in lists] == expected
    asked = len(gateway.asked)
    assert [inputs(node)[name][0] for node, name in lists] == expected
    assert len(gateway.asked) == asked, "one question serves while a page shows its nodes"
    monkeypatch.setattr(comfyui_nodes.load().nodes.gateway, "FRESH_S", 0.0)
    gateway.shutdown()
    gateway.server_close()
    assert [inputs(node)[name][0] for node, name in lists] == expected


def test_a_gateway_that_is_down_hides_no_node(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIORNATA_URL", "http://127.0.0.1:1")
    assert inputs("GiornataEdit")["model"][0] == ["(not set)"]


def test_a_request_names_what_was_set_alone(gateway: Gateway) -> None:
    defaults = {
        name: one[1]["default"] for name, one in inputs("GiornataEdit").items() if "default" in one[-1]
    }
    edit(**defaults | {"seed": 2**40 + 7})
    form = gateway.asked[-1][2]
    named = {
        part.split(b'name="')[1].split(b'"')[0] for part in form.split(b"\r\n\r\n")[:-1] if b'name="' in part
    }
    assert named == {
        b"prompt", b"seed", b"mask_mode", b"stream", b"progress", b"partial_images", b"output_format", b"image",
        b"mask",
    }  # fmt: skip
    assert f"\r\n\r\n{2**40 + 7}\r\n".encode() in form


def test_pictures_and_masks_are_sent_as_comfyui_has_them(gateway: Gateway) -> None:
    edit(mask_blur=2.0)
    files = gateway.asked[-1][2].split(b"\x89PNG")[1:]
    image, mask = (pixels(b"\x89PNG" + data.partition(b"\r\n--")[0]) for data in files)
    assert np.array_equal(image, scene())
    assert np.array_equal(np.atleast_3d(mask)[..., 0], MASK.numpy() * 255), "1 is repainted"


def test_a_generation_carries_its_pictures_in_json(gateway: Gateway) -> None:
    [lora] = run("GiornataLora", lora=f"hats {LORA['id']}", scale=0.5)
    [net] = run("GiornataControlNet", controlnet="outline", image=IMAGE, scale=1.0, start=0.0, end=0.5)
    assert run("GiornataLora", lora="(not set)", scale=1.0, loras=[lora]) == [lora]
    run(
        "GiornataGenerate", prompt="a hat", seed=1, width=64, steps=3, loras=[lora], controlnets=[net],
        reference=torch.cat([IMAGE, IMAGE]), model="(not set)",
    )  # fmt: skip
    body = json.loads(gateway.asked[-1][2])
    pictures = [*body.pop("reference"), body.pop("control_image_0")]
    assert [base64.b64decode(text)[:4] for text in pictures] == [b"\x89PNG"] * 3
    assert body == {
        "prompt": "a hat", "seed": 1, "size": "64x64", "num_inference_steps": 3, "stream": True, "progress": True,
        "partial_images": 4,
        "output_format": "png", "loras": [{"id": LORA["id"], "scale": 0.5}],
        "controlnets": [{"model": "outline", "scale": 1.0, "start": 0.0, "end": 0.5, "image": 0}],
    }  # fmt: skip


def test_pictures_of_a_batch_are_edited_at_once(gateway: Gateway) -> None:
    gateway.gate = threading.Barrier(4)
    assert edit(image=IMAGE.expand(4, -1, -1, -1)).shape == (4, 96, 128, 3)


def test_a_busy_gateway_is_asked_again(gateway: Gateway) -> None:
    gateway.refusals = [(429, BUSY)] * 3
    assert edit().shape == IMAGE.shape
    assert len(gateway.asked) == 4


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            {"code": "invalid_field", "message": "Not accepted.", "param": "num_inference_steps", "received": "201",
             "accepted": "1 to 200"},
            "Not accepted. The input steps was: 201. Accepted: 1 to 200.",
        ),
        (
            {"code": "mask_empty", "message": "The mask selects no pixel.", "param": "mask",
             "received": "mask_mode white, no pixel marked", "accepted": "pixels of luma 128 and above"},
            "The mask selects no pixel. Paint on the mask, or connect another one: 1 is repainted.",
        ),
    ],
)  # fmt: skip
def test_a_refusal_is_told_in_words(gateway: Gateway, error: dict[str, Any], sentence: str) -> None:
    gateway.refusals = [(400, error)]
    with pytest.raises(RuntimeError) as raised:
        edit()
    assert str(raised.value) == sentence


def test_what_cannot_be_edited_is_told_and_not_sent(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="nothing is marked"):
        edit(mask=MASK * 0)
    with pytest.raises(ValueError, match=r"received \(3, "):
        edit(mask=MASK.expand(3, *MASK.shape[-2:]))
    monkeypatch.setenv("GIORNATA_URL", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:9 does not answer"):
        edit()


def test_comfyui_is_told_of_steps_and_its_button_to_stop_cancels_the_job(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []

    class Bar:
        def __init__(self, total: int) -> None:
            assert total == 100

        def update_absolute(self, value: int, total: int, preview: Any) -> None:
            told.append((value, total))

    def stop() -> None:
        if told:
            raise InterruptedError

    comfy, utils, management = (
        ModuleType(name) for name in ("comfy", "comfy.utils", "comfy.model_management")
    )
    vars(utils)["ProgressBar"], vars(management)["throw_exception_if_processing_interrupted"] = Bar, stop
    for module in (comfy, utils, management):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    gateway.stuck = True
    with pytest.raises(InterruptedError):
        edit()
    assert told == [(50, 100)], "one of two steps"
    assert ("DELETE", "/v1/jobs/job1", b"") in gateway.asked


def test_the_registrys_manifest_names_what_clones_install() -> None:
    manifest = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (FOLDER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert manifest["project"]["dependencies"] == [line for line in lines if not line.startswith("#")]
    assert {"name", "version", "description", "license"} <= manifest["project"].keys()
    assert manifest["tool"]["comfy"].keys() >= {"PublisherId", "DisplayName"}

"""What is on the wire today must be readable tomorrow; golden bytes pin it."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from pydantic import BaseModel

from giornata.scheduling.cost_models import work_of
from giornata.wire import codec, masks, messages
from giornata.wire.errors import PayloadTooLarge, SchemaMismatch
from giornata.wire.fleet import FleetSummary
from giornata.wire.jobs import Encoding, Inspection, Job
from giornata.wire.loras import LoraRecord
from giornata.wire.masks import FoundRegion, MaskCard, MaskedRegion, MaskParameters, MaskPicture
from giornata.wire.messages import CancelRows, Picture, StepEvent
from giornata.wire.models import SETTINGS, ModelCard, StepCache
from giornata.wire.values import WireModel
from giornata.wire.workers import ServiceState
from tests.contract.messages import CARD, ENCODING, INSPECTION, JOB, LORA, MESSAGES

STATE = next(message for message in MESSAGES if isinstance(message, ServiceState))
GOLDEN = dict(
    line.split() for line in (Path(__file__).parent / "golden.txt").read_text(encoding="ascii").splitlines()
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_written_and_read_as_the_golden_bytes(message: BaseModel) -> None:
    golden = bytes.fromhex(GOLDEN[type(message).__name__])
    assert codec.encode(message) == golden
    assert codec.decode(type(message), golden) == message


def test_every_message_is_pinned() -> None:
    sent = {
        kind
        for module in (messages, messages, masks)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, WireModel) and kind.__module__ == module.__name__
    }
    nested = {Picture, MaskPicture, MaskedRegion, FoundRegion, MaskParameters, MaskCard}  # inside of messages
    assert sent - nested <= {type(message) for message in MESSAGES}


def test_a_field_of_a_newer_version_is_ignored() -> None:
    data = msgpack.packb({"schema": codec.SCHEMA, "job_id": "j", "attempt": 1, "colour": "teal"})
    assert codec.decode(CancelRows, data) == CancelRows(job_id="j", attempt=1)


@pytest.mark.parametrize("kind", [FleetSummary, ServiceState])
def test_what_was_sent_before_cells_went_is_understood(kind: type[BaseModel]) -> None:
    message = next(one for one in MESSAGES if isinstance(one, kind))
    data = msgpack.packb({**codec.unpack(codec.encode(message)), "cell": "main"})
    assert codec.decode(kind, data) == message


def test_what_was_sent_before_previews_crops_and_reuse_is_understood() -> None:
    job = codec.unpack(codec.encode(JOB))
    for newer in ("partial_images", "padding_mask_crop", "reuse", "halo"):
        del job["parameters"][newer]
    inspection = codec.unpack(codec.encode(INSPECTION))
    del inspection["crop"], inspection["alpha"], inspection["compute_set"]
    card = codec.unpack(codec.encode(CARD))
    del card["native_size"], card["token_latents"], card["mask_grain"]
    earlier = codec.decode(Job, msgpack.packb(job)).parameters
    assert (earlier.partial_images, earlier.padding_mask_crop) == (0, None)
    assert (earlier.reuse, earlier.halo) == ("auto", 1)
    found = codec.decode(Inspection, msgpack.packb(inspection))
    assert (found.painted_box, found.alpha, found.compute_set) == ((0, 0, 64, 48), None, None)
    model = codec.decode(ModelCard, msgpack.packb(card))
    assert (model.native_size, model.pixel_multiple, model.mask_grain) == (1024, 16, 1)


def test_a_lora_from_before_its_weights_were_counted_is_understood() -> None:
    fields = codec.unpack(codec.encode(LORA))
    del fields["canonical"]["weights"]
    found = codec.decode(LoraRecord, msgpack.packb(fields)).canonical
    assert found is not None
    assert found.weights == 0


def test_a_job_from_before_weights_and_idempotency_keys_is_understood() -> None:
    fields = codec.unpack(codec.encode(JOB))
    del fields["weight"], fields["fingerprint"]
    job = codec.decode(Job, msgpack.packb(fields))
    assert (job.weight, job.fingerprint) == (1.0, None)


def test_a_job_with_the_step_cache_that_is_gone_is_read_and_computes_all_blocks() -> None:
    fields = codec.unpack(codec.encode(JOB))
    earlier = {name: value for name, value in fields["parameters"].items() if name not in SETTINGS}
    fields["parameters"] = {**earlier, "step_cache": "first-block", "step_cache_threshold": 0.1}
    job = codec.decode(Job, msgpack.packb(fields))
    assert job.parameters.step_cache is StepCache.OFF
    assert job.parameters.prompt == JOB.parameters.prompt


def test_telemetry_from_before_cost_models_is_understood() -> None:
    state = codec.unpack(codec.encode(STATE))
    del state["worker"]["cost_model"], state["worker"]["blocks"]
    for newer in (
        "projected_tokens",
        "loaded_bytes",
        "predicted_ms",
        "reusing_ms",
        "excess_ms",
        "calls",
        "linear",
        "attention",
        "convolution",
        "gathered",
    ):
        del state["worker"]["samples"][0][newer]
    worker = codec.decode(ServiceState, msgpack.packb(state)).worker
    assert worker is not None
    assert worker.cost_model is None
    (sample,) = worker.samples
    assert (sample.projected_tokens, sample.loaded_bytes, sample.predicted_ms) == (0, 0, 0.0)
    assert (sample.reusing_ms, sample.excess_ms) == (0.0, 0.0)
    assert work_of(sample).multiplications == 0.0


def test_what_was_sent_before_padding_was_told_is_understood() -> None:
    encoding, state = codec.unpack(codec.encode(ENCODING)), codec.unpack(codec.encode(STATE))
    del encoding["padding_tokens"]
    del state["worker"]["cost_model"]["keeps_padding"], state["worker"]["running"][0]["padding_tokens"]
    assert codec.decode(Encoding, msgpack.packb(encoding)).padding_tokens == 0
    worker = codec.decode(ServiceState, msgpack.packb(state)).worker
    assert worker is not None
    assert worker.cost_model is not None
    assert (worker.cost_model.keeps_padding, worker.running[0].padding_tokens) == (False, 0)


def test_every_missing_or_wrong_field_is_named() -> None:
    data = msgpack.packb({"schema": codec.SCHEMA, "job_id": "j", "attempt": "many"})
    with pytest.raises(SchemaMismatch, match=r"attempt: .*index: .*step: .*steps: "):
        codec.decode(StepEvent, data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"job_id": "j", "attempt": 1}),
        msgpack.packb({"schema": codec.SCHEMA + 1, "job_id": "j", "attempt": 1}),
        msgpack.packb({1: 2}),
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb({"schema": [1], "job_id": "j", "attempt": 1}),
        msgpack.packb({"schema": codec.SCHEMA, "job_id": msgpack.ExtType(1, b"x"), "attempt": 1}),
    ],
    ids=[
        "empty",
        "reserved byte",
        "not a map",
        "no schema",
        "newer schema",
        "integer key",
        "claims 4 G entries",
        "schema is a list",
        "a type of its own",
    ],
)
def test_what_is_no_message_is_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(SchemaMismatch):
        codec.decode(CancelRows, data)


def test_a_control_message_stays_small() -> None:
    with pytest.raises(PayloadTooLarge, match="262144"):
        codec.encode(CancelRows(job_id="j" * codec.MAX_CONTROL_BYTES, attempt=1))

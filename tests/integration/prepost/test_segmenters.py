"""Segmenters of transformers: what each sees equals what transformers' own code says, and wrong ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from transformers import (
    AutoModelForZeroShotObjectDetection,
    AutoProcessor,
    CLIPSegForImageSegmentation,
    Sam2Model,
    pipeline,
)
from transformers.image_transforms import center_to_corners_format

from giornata.wire.errors import Failed, InvalidField
from giornata_prepost.config import PrepostConfig
from giornata_prepost.segmentation import Detection, HeatMap, RegionCriteria, Segmenter, rehearse_segmenter
from giornata_prepost.segmenters import Sam2, open_segmenter
from tests.fakes import tiny_segmenters
from tests.shared_files import SharedFolders

PICTURE = np.random.default_rng(0).integers(0, 256, (50, 90, 3), np.uint8)
WORDS = "the hat"
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(shared_folders: SharedFolders) -> Folder:
    """The folder of a tiny checkpoint of a kind."""
    return lambda kind: shared_folders.folder(f"segmenters/{kind}", getattr(tiny_segmenters, kind))


def opened(model: Path | str, refiner: Path | None = None) -> Segmenter:
    config = PrepostConfig(
        model="unused",
        mask_model=str(model),
        mask_refiner=None if refiner is None else str(refiner),
        device="cpu",
    )
    segmenter = open_segmenter(config)
    assert segmenter is not None
    return segmenter


def test_clipseg_sees_what_its_network_says(folder: Folder) -> None:
    path = folder("clipseg")
    processor = AutoProcessor.from_pretrained(path)
    inputs = processor(text=[WORDS], images=[Image.fromarray(PICTURE)], return_tensors="pt")
    with torch.no_grad():
        logits = CLIPSegForImageSegmentation.from_pretrained(path)(**inputs).logits
    segmenter = opened(path)
    seen = segmenter.seen(PICTURE, WORDS, RegionCriteria(0.5, 4))
    assert isinstance(seen, HeatMap)
    torch.testing.assert_close(
        torch.from_numpy(seen.heat), torch.sigmoid(logits.squeeze()), atol=1e-5, rtol=0
    )
    other = segmenter.seen(PICTURE, "a shoe", RegionCriteria(0.5, 4))
    assert isinstance(other, HeatMap)
    assert np.abs(other.heat - seen.heat).max() > 1e-3
    assert segmenter.card.name == path.name
    rehearse_segmenter(segmenter)


@pytest.mark.parametrize("kind", ["owlvit", "owlv2"])
def test_a_detector_finds_the_boxes_of_transformers_own_pipeline(folder: Folder, kind: str) -> None:
    path = folder(kind)
    detect = pipeline("zero-shot-object-detection", model=str(path), device="cpu")
    told = detect(Image.fromarray(PICTURE), candidate_labels=[WORDS], threshold=0.3)
    segmenter = opened(path)
    seen = segmenter.seen(PICTURE, WORDS, RegionCriteria(0.3, 1000))
    assert not isinstance(seen, HeatMap)
    sides = np.array([90, 50, 90, 50])
    assert seen
    assert seen[0].score == pytest.approx(max(one["score"] for one in told), abs=1e-4)
    for one in seen:  # the pipeline's boxes are cut to whole pixels
        box = np.array(one.box) * sides
        assert any(
            abs(other["score"] - one.score) < 1e-4
            and np.abs(np.array(list(other["box"].values())) - box).max() < 1.01
            for other in told
        )
    assert segmenter.card.threshold == 0.1


def test_grounding_dino_is_asked_for_a_phrase_in_its_own_form(folder: Folder) -> None:
    path = folder("grounding_dino")
    processor = AutoProcessor.from_pretrained(path)
    network = AutoModelForZeroShotObjectDetection.from_pretrained(path).eval()
    inputs = processor(text="the hat.", images=Image.fromarray(PICTURE), return_tensors="pt")
    with torch.no_grad():
        told = network(**inputs)
    scores = torch.sigmoid(told.logits[0]).max(dim=-1).values
    boxes = center_to_corners_format(told.pred_boxes[0])
    segmenter = opened(path)
    seen = segmenter.seen(PICTURE, "The hat.", RegionCriteria(0.01, 100))
    assert not isinstance(seen, HeatMap)
    assert seen
    assert seen[0].score == pytest.approx(float(scores.max()), abs=1e-5)
    for one in seen:
        near = (scores - one.score).abs() < 1e-4
        assert (boxes[near] - torch.tensor(one.box)).abs().max(dim=1).values.min() < 1e-4
    assert segmenter.card.threshold == 0.25


def test_where_nothing_is_sure_enough_the_best_box_tells_the_best_score(folder: Folder) -> None:
    segmenter = opened(folder("owlvit"))
    every = segmenter.seen(PICTURE, WORDS, RegionCriteria(0.001, 1000))
    none = segmenter.seen(PICTURE, WORDS, RegionCriteria(1.1, 1000))
    assert not isinstance(every, HeatMap)
    assert not isinstance(none, HeatMap)
    assert [one.score for one in none] == [every[0].score]


def test_a_refiner_outlines_what_is_in_a_box(folder: Folder) -> None:
    candidates = (Detection(0.9, (0.1, 0.2, 0.5, 0.9)), Detection(0.4, (0.5, -0.1, 1.2, 0.5)))
    refiner = Sam2(folder("sam2"), torch.device("cpu"))
    outlined = refiner.outlined(PICTURE, candidates)
    network = Sam2Model.from_pretrained(folder("sam2")).eval()
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    square = np.asarray(Image.fromarray(PICTURE).resize((128, 128), Image.Resampling.BILINEAR)) / 255
    pixels = torch.from_numpy(((square - mean) / deviation).transpose(2, 0, 1)[None]).float()
    boxes = torch.tensor([[[12.8, 25.6, 64.0, 115.2], [64.0, 0.0, 128.0, 64.0]]])
    with torch.no_grad():
        masks = network(pixel_values=pixels, input_boxes=boxes, multimask_output=False).pred_masks[0, :, 0]
    for one, candidate, mask in zip(outlined, candidates, masks, strict=True):
        assert (one.score, one.box) == (candidate.score, candidate.box)
        assert one.heat is not None
        torch.testing.assert_close(torch.from_numpy(one.heat), torch.sigmoid(mask), atol=1e-4, rtol=0)


def test_a_detector_with_a_refiner_outlines_what_is_taken(folder: Folder) -> None:
    seen = opened(folder("owlv2"), folder("sam2")).seen(PICTURE, WORDS, RegionCriteria(0.3, 2))
    assert not isinstance(seen, HeatMap)
    assert len(seen) == 2
    assert all(
        one.heat is not None and one.heat.shape == seen[0].heat.shape
        for one in seen
        if seen[0].heat is not None
    )


@pytest.mark.parametrize("kind", ["clipseg", "owlvit"])
def test_more_words_than_a_segmenter_reads_are_refused(folder: Folder, kind: str) -> None:
    with pytest.raises(InvalidField, match=r"too long.*at most (77|16)") as caught:
        opened(folder(kind)).seen(PICTURE, "x" * 100, RegionCriteria(0.5, 1))
    assert caught.value.field == "mask_prompt"


def test_what_finds_nothing_by_words_is_refused(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"finds nothing by words.*sam2.*CLIPSeg"):
        opened(folder("sam2"))
    with pytest.raises(Failed, match="of the kind clipseg, and SAM 2 is accepted"):
        opened(folder("owlvit"), folder("clipseg"))
    with pytest.raises(Failed, match="takes no refiner"):
        opened(folder("clipseg"), folder("sam2"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "no such", "auto_map": {"AutoConfig": "x.Y"}})
    )
    with pytest.raises(Failed, match="cannot be loaded"):
        opened(tmp_path)
    with pytest.raises(Failed, match="cannot be loaded"):
        opened("no folder and no hub id")


def test_weights_that_are_pickled_are_refused(folder: Folder, tmp_path: Path) -> None:
    for file in folder("clipseg").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    network = CLIPSegForImageSegmentation.from_pretrained(folder("clipseg"))
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(Failed, match="safetensors"):
        opened(tmp_path)


def test_weights_that_are_not_finite_are_refused_at_the_start(folder: Folder, tmp_path: Path) -> None:
    network = CLIPSegForImageSegmentation.from_pretrained(folder("clipseg"))
    torch.nn.init.constant_(network.decoder.film_mul.weight, torch.nan)
    network.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(folder("clipseg")).save_pretrained(tmp_path)
    with pytest.raises(Failed, match="not finite"):
        rehearse_segmenter(opened(tmp_path))


def test_a_refiner_alone_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ValidationError, match="needs mask_model"):
        PrepostConfig(model="unused", mask_refiner="facebook/sam2.1-hiera-tiny")

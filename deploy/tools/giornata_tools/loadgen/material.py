"""The files of requests, made before the first of them leaves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from giornata_tools.loadgen.masks import mask, mask_file
from giornata_tools.loadgen.pictures import generated, upright_size
from giornata_tools.loadgen.workload import Request


@dataclass(frozen=True)
class TemplatePicture:
    """A picture that requests edit."""

    file: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Material:
    """Files by what they depend on."""

    templates: Mapping[int, TemplatePicture]
    masks: Mapping[Request, bytes]


def given(files: Sequence[bytes]) -> dict[int, TemplatePicture]:
    """Templates of encoded pictures, in order.

    Raises:
        ValueError: one of them is no picture; says the number.
    """
    found = {}
    for number, file in enumerate(files):
        try:
            found[number] = TemplatePicture(file, *upright_size(file))
        except ValueError as error:
            raise ValueError(f"picture {number}: {error}") from error
    return found


def made(requests: Sequence[Request], width: int, height: int, seed: int) -> dict[int, TemplatePicture]:
    """The templates that `requests` edit, generated."""
    numbers = sorted({request.template for request in requests})
    return {
        number: TemplatePicture(generated(width, height, seed + number), width, height) for number in numbers
    }


def material(requests: Sequence[Request], templates: Mapping[int, TemplatePicture]) -> Material:
    """Everything that `requests` are made of; `templates` has all that they edit."""
    masks = {request: _mask(request, templates[request.template]) for request in requests}
    return Material(templates, masks)


def _mask(request: Request, template: TemplatePicture) -> bytes:
    return mask_file(mask(template.width, template.height, request.mask_ratio, request.shape, request.seed))

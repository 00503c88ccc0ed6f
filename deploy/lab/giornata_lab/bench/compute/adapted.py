"""The model and the adapters that ship, in this process: edits under them, in full and from templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from giornata.control.networks import ControlNet, load
from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata.wire.adapters import ControlInput, control_name
from giornata_denoiser.controls.local import ControlNetTarget, control_target
from giornata_denoiser.engine.batch_tensors import ControlExecutor
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.rows.row import NONE, Adapters, RecordingSpec, Row, RowControl, RowLora
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute.bench_model import BenchModel, Request
from giornata_lab.bench.compute.setting import DEFAULT
from giornata_lab.model.adapters import card, judging
from giornata_prepost.families.protocol import ControlImage, ControlledModel
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.loras.normalisation import normalise
from giornata_tools.checkout import TRAINED

LORAS: Final = ("swapped", "outlined")
CONTROLNET: Final = "outline"

Way = Callable[[Mapping[str, ControlNet], ControlNetTarget], ControlExecutor]
"""Makes what computes the residuals of ControlNets, which are by digest, for a network."""


class ShippedLoras:
    """The LoRAs that ship, as prepost hands them on, for an engine."""

    def __init__(self) -> None:
        self._sets: dict[tuple[RowLora, ...], SequenceLoras] = {
            (RowLora(name),): low_rank(name, [(_canonical(name), 1.0)]) for name in LORAS
        }

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        """The set of one LoRA."""
        return self._sets.get(loras)


def _canonical(name: str) -> Mapping[str, Tensor]:
    with TemporaryDirectory() as folder:
        file = Path(folder, "canonical.safetensors")
        normalise(card.read(name).file, file, TRAINED, {})
        return {key: tensor.float() for key, tensor in load_file(file).items()}


@dataclass(frozen=True, eq=False)
class Edits:
    """Edits of one kind, computed in full with `rows`."""

    requests: Sequence[Request]
    rows: Sequence[Row]

    def under(self, adapters: Adapters) -> Edits:
        """The same edits, all under these."""
        return replace(self, rows=[replace(row, adapters=adapters) for row in self.rows])


class AdaptedBenchModel:
    """The model that ships at guidance 30, with its LoRAs and its ControlNet, in float32 on the CPU."""

    def __init__(self, steps: int) -> None:
        self._model = BenchModel(TRAINED, steps=steps, guidance=judging.GUIDANCE, low_ranks=ShippedLoras())
        folder = card.read(CONTROLNET).file.parent
        self._net = load(folder, torch.float32, torch.device("cpu"), CONTROLNET)
        of = control_target(self._model.family.network, self._model.checkpoint.card.pixel_multiple)
        if of is None:
            raise TypeError("the model that ships has no ControlNets")
        self._network = of

    def edits(self, requests: Sequence[Request]) -> Edits:
        """Without adapters, from the noise that reuse has."""
        return Edits(requests, [self._model.edit(request, DEFAULT.halo) for request in requests])

    def controlled(self, edits: Edits, images: Sequence[Pixels]) -> Edits:
        """The edits under the ControlNet, which acts in all steps; `images` are what it is shown, by edit."""
        control = RowControl(CONTROLNET, self._net.card.digest, 1.0, 0, self._model.steps)
        rows = [
            replace(row, control_images=(self._seen(image),))
            for row, image in zip(edits.rows, images, strict=True)
        ]
        return replace(edits, rows=rows).under(Adapters(controls=(control,)))

    def _seen(self, image: Pixels) -> Tensor:
        """(tokens, channels) of a control image."""
        shown = [ControlImage(image, ControlInput.USUAL)]
        encoded = cast("ControlledModel", self._model.images).encode_controls(shown, None)
        return encoded.condition(torch.Generator())[control_name(0)]

    def templates(self, edits: Edits, adapters: Adapters = NONE) -> list[CachedTemplate]:
        """As the product records them, but under `adapters`."""
        recording = RecordingSpec(frozenset({DEFAULT.form}), DEFAULT.bits)
        return [
            self._model.template(request, recording, DEFAULT.levels, adapters) for request in edits.requests
        ]

    def reusing(self, edits: Edits, templates: Sequence[CachedTemplate]) -> Edits:
        """The edits with what lies outside their masks from `templates`."""
        rows = [
            replace(
                row,
                region=self._model.region(request, DEFAULT.halo),
                template=template,
                keeps_padding=DEFAULT.keeps_padding,
            )
            for request, row, template in zip(edits.requests, edits.rows, templates, strict=True)
        ]
        return replace(edits, rows=rows)

    def painted(self, edits: Edits, way: Way | None = None, *, corrected: bool = True) -> list[Pixels]:
        """The model's pictures; `way` makes the ControlNet's residuals."""
        how = ReuseOptions(correction_bits=DEFAULT.bits if corrected else None)
        controls = None if way is None else way({self._net.card.digest: self._net}, self._network)
        return [self._model.decode(row) for row in self._model.run(edits.rows, how, controls)]

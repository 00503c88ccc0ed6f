"""How far is each family from diffusers? The figures of the tests that compare them, as one table.

``python -m tests.lab.bench.families`` runs those tests and prints the largest distance that each column's found: final
latents of tiny random checkpoints against the family's pipeline, relative to the largest value, and a step under LoRAs
against PEFT's. Flux and all LoRAs are compared in float64, other families in float32. An edit with references counts in
their column, masked or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import Several, option, parsed
from tests.distances import FOUND
from tests.integration.conformance.families import CASES

EQUALS, MASKED, REFERENCES, LORA = "equals diffusers", "masked", "references", "LoRA"
COLUMNS: Final = (EQUALS, MASKED, REFERENCES, LORA)
MADE: Final = "test_a_generation_equals_the_text_to_image_pipeline"


@dataclass(frozen=True)
class Comparisons:
    """The tests of one file that compare with diffusers, and of which families."""

    columns: Mapping[str, str]
    """By name of the test: the column of its cases without references."""
    family: str = ""
    """Of all cases that name none themselves."""
    names: Mapping[object, str] = field(default_factory=dict)
    """What the cases' own parameters call families."""


BEFORE_2511: Final = "qwen-image-edit-plus (2509)"
PLUS: Final = "qwen-image-edit-plus (2511)"
SUITE: Final = "tests/integration/conformance/test_families.py"
GUIDED: Final = "test_a_guided_edit_equals_the_pipeline"
FILES: Final = {
    SUITE: Comparisons(
        {
            GUIDED: MASKED,
            "test_an_edit_below_full_strength_equals_the_pipeline": MASKED,
            "test_an_edit_of_a_whole_picture_equals_the_pipeline": EQUALS,
            "test_a_generation_equals_the_pipeline": EQUALS,
        },
        names={"qwen-image-edit-plus": BEFORE_2511, "qwen-image-edit-2511": PLUS},
    ),
    "tests/integration/denoiser/test_oracle.py": Comparisons(
        {
            MADE: EQUALS,
            "test_an_edit_of_the_whole_picture_equals_the_image_to_image_pipeline": EQUALS,
            "test_inpainting_equals_diffusers": MASKED,
        },
        "flux-inpaint",
    ),
    "tests/unit/denoiser/families/test_low_rank_rows.py": Comparisons(
        {
            "test_driven_rows_equal_peft_alone": LORA,
            "test_flux_rows_equal_peft_alone": LORA,
            "test_unet_rows_equal_peft_alone_as_maps_and_as_tiles": LORA,
        },
        "flux-inpaint",
        {"qwen-image-edit-plus": PLUS, "xl": "sdxl"},
    ),
}
SAME_NETWORK: Final = {BEFORE_2511: "qwen-image-edit", "flux-kontext": "flux-inpaint"}
"""Families whose steps under LoRAs are those of another one's network."""
NAMED: Final = ("of", "name", "shape")
"""Parameters that tell a case's family."""


class DistanceTable:
    """A plugin of pytest that notes the largest distance of each family and column."""

    def __init__(self) -> None:
        self.largest: dict[str, dict[str, float]] = defaultdict(dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Note what a comparison found, if it passes."""
        FOUND.clear()
        yield
        if FOUND:
            family, column = _place(item)
            self.largest[family][column] = max(*FOUND, self.largest[family].get(column, 0.0))


def _place(item: pytest.Item) -> tuple[str, str]:
    """Family and column of a case."""
    case: Any = item
    of = FILES[item.nodeid.partition("::")[0]]
    told: dict[str, Any] = case.callspec.params if hasattr(case, "callspec") else {}
    family = next((told[name] for name in NAMED if name in told), of.family)
    looking = case.originalname == GUIDED and CASES[family].references
    column = REFERENCES if looking else of.columns[case.originalname]
    return of.names.get(family, str(family)), column


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--files", type=Several(str), default=list(FILES), help="of tests"),
            option("--threads", type=int, default=1, help="of torch"),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, write ``out/bench/families.json``; exit status 1 where a comparison failed."""
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    tests = [f"{file}::{test}" for file in options.files for test in FILES[file].columns]
    table = DistanceTable()
    status = pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[table])
    for family, other in SAME_NETWORK.items():
        if family in table.largest and LORA in table.largest.get(other, {}):
            table.largest[family][LORA] = table.largest[other][LORA]
    lines = [
        {"family": family, **{each: f"{found[each]:.1e}" if each in found else "" for each in COLUMNS}}
        for family, found in sorted(table.largest.items())
    ]
    if lines:
        write("families", lines, workload=vars(options))
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()

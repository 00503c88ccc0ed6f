"""Write the page of what can be combined: ``python -m deploy.composition > docs/composition.md``.

The tests of ``tests/integration/test_composition.py`` go by the same tables: a pair that is not refused here has to
compute as alone, and one that is refused has to be answered with its code. A row that is deleted is a pair to compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Final, NamedTuple

Pair = tuple[str, str]
"""Two features, in the order of :data:`FEATURES`."""


class PairRefusal(NamedTuple):
    """Why something is not computed, and how a request for it is answered."""

    code: str | None
    """The error's; None where nothing is answered, because there is nothing to do."""
    reason: str


FEATURES: Final[Mapping[str, str]] = {
    "hit": "an edit whose picture has a template",
    "miss": "an edit that reuses without a template",
    "padding": "kept padding of prompts (`GIORNATA_REUSE_TEXT=padding`)",
    "lora": "a LoRA",
    "loras": "two LoRAs",
    "control": "a ControlNet in the denoiser",
    "service": "a ControlNet of the ControlNet service",
    "cache": "a step cache",
    "reference": "a reference picture",
    "stochastic": "a stochastic sampler",
    "guidance": "classifier-free guidance",
    "degree": "two devices",
    "late": "a LoRA that joins late",
    "resumed": "a worker that stops, and another that goes on",
}
"""What a row may have, and how the page calls it."""
FAMILIES: Final[Mapping[str, str]] = {"flux": "Flux.1", "sd3": "Stable Diffusion 3", "unet": "SD, SDXL"}

EXCLUSIVE: Final[frozenset[Pair]] = frozenset({("hit", "miss"), ("control", "service")})
"""One row has one of them: they compose side by side."""

_RESIDUALS: Final = PairRefusal(
    "invalid_field",
    "what a ControlNet adds belongs to one step, and a step that is skipped has no place for it",
)
REFUSED: Final[Mapping[Pair, PairRefusal]] = {
    ("control", "cache"): _RESIDUALS,
    ("service", "cache"): _RESIDUALS,
}
"""Pairs that no family computes."""

_NO_PADDING: Final = PairRefusal(None, "its blocks compute no padding of prompts: there is nothing to keep")
_NO_REFERENCE: Final = PairRefusal("invalid_field", "the model looks at no other picture")
_NO_NOISE: Final = PairRefusal("invalid_field", "flow matching has no stochastic sampler")
LACKING: Final[Mapping[Pair, PairRefusal]] = {
    ("flux", "stochastic"): _NO_NOISE,
    ("sd3", "stochastic"): _NO_NOISE,
    ("sd3", "padding"): _NO_PADDING,
    ("sd3", "reference"): _NO_REFERENCE,
    ("unet", "padding"): _NO_PADDING,
    ("unet", "reference"): _NO_REFERENCE,
    ("unet", "cache"): PairRefusal("invalid_field", "no settings are published for the outputs of a UNet"),
}
"""Families that lack a feature, alone as well as beside another."""

PAGE: Final = """# What can be combined?

An edit or a generation can have any two of these together, but for the pairs with a letter. Such a request is refused
before it is computed; nothing is left out in silence. Edits of one batch never change each other: each is computed as
alone. This page is generated from the table by which the tests compute every pair: `python -m deploy.composition`.

{matrix}

*beside*: one picture has the one or the other, and pictures of both kinds share a batch. *none*: no model has both.

## Which models have it?

{families}

References are those of Flux.1 Kontext. A UNet has two devices by the halves of guidance alone; its rows without
guidance have one.

## Why not?

{reasons}

The field `approximate` of earlier versions, which began a picture with the latent of another, is gone: `unknown_field`
says so.
"""


def pairs() -> Iterator[Pair]:
    """Every two features."""
    return combinations(FEATURES, 2)


def families_of(*features: str) -> tuple[str, ...]:
    """The families that have all of these."""
    return tuple(of for of in FAMILIES if not any((of, feature) in LACKING for feature in features))


def page() -> str:
    """The page as Markdown: the matrix, the families, and the reasons."""
    letters = {
        each: chr(ord("a") + n)
        for n, each in enumerate(dict.fromkeys((*REFUSED.values(), *LACKING.values())))
    }

    def cell(refusal: PairRefusal | None, yes: str = "yes") -> str:
        return yes if refusal is None else f"**{letters[refusal]}**"

    def together(pair: Pair) -> str:
        if not families_of(*pair):
            return "none"
        return cell(REFUSED.get(pair), "beside" if pair in EXCLUSIVE else "yes")

    names = list(FEATURES)
    matrix = [
        [
            str(n + 1),
            FEATURES[name],
            *(together((other, name)) for other in names[:n]),
            *[""] * (len(names) - n - 1),
        ]
        for n, name in enumerate(names)
    ]
    families = [
        [title, *(cell(LACKING.get((of, name))) for of in FAMILIES)] for name, title in FEATURES.items()
    ]
    reasons = [
        [f"**{letter}**", each.reason, "none" if each.code is None else f"`{each.code}`"]
        for each, letter in letters.items()
    ]
    return PAGE.format(
        matrix=_table(["", "", *(str(n + 1) for n in range(len(names) - 1))], matrix),
        families=_table(["", *FAMILIES.values()], families),
        reasons=_table(["", "reason", "error"], reasons),
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")

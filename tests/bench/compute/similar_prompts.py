"""What prompts of other edits are like, what began with their latents, and how many steps that may save. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from giornata_tools.model.scenes import COLOURS, SHAPES
from giornata_tools.model.scenes.captions import article, plain

SAME: Final = "the same"
PARAPHRASES: Final = ("put {a} {one} here", "add {a} {one}", "the {one}", "draw {a} {one} here")
FLOORS: Final = (0.95, 0.85, 0.75, -1.0)
"""Least cosine of each group, the most alike first."""
JUDGED: Final = 0.75
"""Groups below it are shown and never in the table: they have no least cosine to speak of."""
LEAST_EDITS: Final = 20
"""A group of fewer tells nothing."""
MOST_LOST: Final = 1.0
"""Points of adherence, of 100."""


def sources(colour: str, shape: str, chance: random.Random) -> dict[str, str]:
    """Prompts whose latents an edit that asks for "a `colour` `shape`" begins with, by how they differ.

    Args:
        colour: of the thing that is asked for.
        shape: of the thing that is asked for.
        chance: picks the paraphrase, other colours and other shapes.
    """
    colours, shapes = [c for c in COLOURS if c != colour], [s for s in SHAPES if s != shape]
    words = chance.choice(PARAPHRASES)
    return {
        SAME: plain(colour, shape),
        "paraphrase": words.format(a=article(colour), one=f"{colour} {shape}"),
        "other colour": plain(chance.choice(colours), shape),
        "other shape": plain(colour, chance.choice(shapes)),
        "both other": plain(chance.choice(colours), chance.choice(shapes)),
    }


@dataclass(frozen=True)
class Begun:
    """An edit that began with another edit's latent, beside the same from that edit's noise."""

    source: str
    """How the other edit's prompt differs: a key of :func:`sources`."""
    cosine: float
    """Of both prompts."""
    share: float
    """Of the steps that were not made."""
    right: bool
    """Whether colour and shape are as asked for."""
    scratch_right: bool
    """The same of the edit with all steps."""
    ssim: float
    """To the edit with all steps, in the mask."""

    @property
    def lost(self) -> float:
        """Points of adherence: 100, 0, or -100 where it is right and the whole edit is not."""
        return 100.0 * (self.scratch_right - self.right)


def floor_of(cosine: float) -> float:
    """Of the group that `cosine` belongs to."""
    return next(floor for floor in FLOORS if cosine >= floor)


def group_name(floor: float) -> str:
    """For tables: ">= 0.95", "0.85-0.95", "< 0.75"."""
    place = FLOORS.index(floor)
    if place == 0:
        return f">= {floor:g}"
    above = FLOORS[place - 1]
    return f"< {above:g}" if place == len(FLOORS) - 1 else f"{floor:g}-{above:g}"


def line(name: str, edits: Sequence[Begun]) -> dict[str, Any]:
    """A table's line: what edits of one share of steps lost, with the standard error of points (0 of a single edit)."""
    lost = [each.lost for each in edits]
    error = statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else 0.0
    return {
        "latent of": name,
        "points lost": round(statistics.fmean(lost), 2),
        "error": round(error, 2),
        "steps saved": edits[0].share,
        "right %": round(100 * statistics.fmean(each.right for each in edits), 1),
        "in full %": round(100 * statistics.fmean(each.scratch_right for each in edits), 1),
        "SSIM": round(statistics.fmean(each.ssim for each in edits), 4),
        "cosine": round(statistics.fmean(each.cosine for each in edits), 3),
        "edits": len(edits),
    }


def shares(edits: Iterable[Begun]) -> dict[float, list[Begun]]:
    """By share, the least first."""
    found: dict[float, list[Begun]] = {}
    for each in sorted(edits, key=lambda one: one.share):
        found.setdefault(each.share, []).append(each)
    return found


def chosen(edits: Iterable[Begun]) -> float:
    """The largest share up to which each loses at most `MOST_LOST` points; 0 where none does, or of too few edits.

    What is within it again after one that is not is chance, and does not count. Edits that begin with the latent of the
    very same prompt lose nothing by construction, and are left out.
    """
    best = 0.0
    for share, group in shares(one for one in edits if one.source != SAME).items():
        lost = statistics.fmean(one.lost for one in group)
        if len(group) < LEAST_EDITS or lost > MOST_LOST:
            break
        best = share
    return best


def table(edits: Sequence[Begun]) -> list[dict[str, float]]:
    """Lines of a :class:`giornata.approximate.table.SkipTable`: shares that do not grow as cosines fall.

    It ends with the first group that may save nothing.
    """
    lines: list[dict[str, float]] = []
    most = 1.0
    for floor in FLOORS:
        if floor < JUDGED:
            break
        most = min(most, chosen(one for one in edits if floor_of(one.cosine) == floor))
        if most == 0:
            break
        lines.append({"cosine": floor, "share": most})
    return lines


def judged(edits: Sequence[Begun], lines: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """What the table's lines lose with other edits than those that chose them."""
    found = []
    for one in lines:
        taken = [
            each
            for each in edits
            if each.source != SAME and floor_of(each.cosine) == one["cosine"] and each.share == one["share"]
        ]
        if taken:
            found.append(line(group_name(one["cosine"]), taken))
    return found

"""Procedural scenes: what the built-in model learns from, and what it is measured with. Nothing is downloaded.

A scene is a background with a few coloured shapes, a mask, and a caption of what belongs into the mask. Everything is a
function of a seeded generator, so that equal seeds give equal pixels. Pure.
"""

from giornata_lab.model.scenes.scene import Scene, SceneTask, sample
from giornata_lab.model.scenes.shapes import COLOURS, GROUNDS, SHAPES

__all__ = ["COLOURS", "GROUNDS", "SHAPES", "Scene", "SceneTask", "sample"]

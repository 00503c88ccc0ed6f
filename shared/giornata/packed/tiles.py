"""Maps and tokens, where a token is a square tile of a map: its channels are (channel, y, x) in this order. Pure."""

from __future__ import annotations

from torch import Tensor


def joined(tiles: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens as maps: (pictures, tiles, channels, side, side) → (pictures, channels, height, width).

    `grid` is height and width of each picture in tiles.
    """
    pictures, _, channels, side, _ = tiles.shape
    rows, columns = grid
    maps = tiles.view(pictures, rows, columns, channels, side, side).permute(0, 3, 1, 4, 2, 5)
    return maps.reshape(pictures, channels, rows * side, columns * side)


def parted(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of :func:`joined`."""
    pictures, channels, height, width = maps.shape
    rows, columns = grid
    tiles = maps.reshape(pictures, channels, rows, height // rows, columns, width // columns)
    tiles = tiles.permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(pictures, rows * columns, channels, height // rows, width // columns)

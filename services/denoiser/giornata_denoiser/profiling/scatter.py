"""A picture of a fit: every sample's predicted time against its measured one, as SVG. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from typing import Final

from giornata_denoiser.profiling.fitting import Prediction

SIDE: Final = 360
MARGIN: Final = 56


def scatter(title: str, points: Sequence[Prediction]) -> str:
    """An SVG document with logarithmic axes in ms; the line is where both are equal."""
    times = [time for point in points for time in point if time > 0]
    low, high = floor(log10(min(times))), ceil(log10(max(times)))
    high = max(high, low + 1)

    def place(ms: float) -> float:
        return (log10(max(ms, 10.0**low)) - low) / (high - low) * SIDE

    whole = SIDE + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {whole}"',
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{whole}" height="{whole}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="{MARGIN - 16}" font-size="14">{title}</text>',
        f'<g transform="translate({MARGIN} {MARGIN})">',
        *_axes(low, high),
        f'<path d="M0 {SIDE}L{SIDE} 0" stroke="#888" stroke-dasharray="4"/>',
        *(
            f'<circle cx="{place(one.measured_ms):.1f}" cy="{SIDE - place(one.predicted_ms):.1f}" r="2.5"'
            ' fill="#1565c0" fill-opacity="0.6"/>'
            for one in points
        ),
        "</g></svg>",
    ]
    return "\n".join(lines) + "\n"


def _axes(low: int, high: int) -> Iterator[str]:
    for power in range(low, high + 1):
        at = (power - low) / (high - low) * SIDE
        yield f'<path d="M{at:.1f} 0V{SIDE}M0 {SIDE - at:.1f}H{SIDE}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{SIDE + 16}" text-anchor="middle">{10.0**power:g}</text>'
        yield f'<text x="-6" y="{SIDE - at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    yield f'<text x="{SIDE / 2}" y="{SIDE + 36}" text-anchor="middle">measured, ms</text>'
    yield (
        f'<text transform="translate(-40 {SIDE / 2}) rotate(-90)" text-anchor="middle">predicted, ms</text>'
    )

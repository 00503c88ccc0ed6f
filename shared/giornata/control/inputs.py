"""What ControlNets see of a row, from the claim checks of its job and the tensors behind them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from giornata.control.protocol import ControlText
from giornata.tensors import NEGATIVE
from giornata.wire.adapters import control_name
from giornata.wire.errors import SchemaMismatch
from giornata.wire.jobs import BlobRef, Encoding


def images_of(encoding: Encoding, index: int) -> BlobRef:
    """The control images of row `index`, or of all rows.

    Raises:
        SchemaMismatch: there are none.
    """
    images = encoding.controls
    if index >= len(encoding.rows) or len(images) not in {1, len(encoding.rows)}:
        raise SchemaMismatch("A row has no control images.", received=index)
    return images[index if len(images) > 1 else 0]


def images(named: Mapping[str, Tensor], count: int) -> tuple[Tensor, ...]:
    """The control images of a job with so many ControlNets, in their order.

    Raises:
        SchemaMismatch: one is missing.
    """
    names = [control_name(index) for index in range(count)]
    if missing := [name for name in names if name not in named]:
        raise SchemaMismatch("The control images are not those of the job.", received=", ".join(missing))
    return tuple(named[name] for name in names)


def texts(
    named: Mapping[str, Tensor], sequences: int, guidance_scale: float | None
) -> tuple[ControlText, ...]:
    """The text of each sequence: the prompt's and, with classifier-free guidance, the negative prompt's.

    `guidance_scale` is the distilled one.

    Raises:
        SchemaMismatch: one is missing.
    """
    found = []
    for prefix in ("", NEGATIVE)[:sequences]:
        if (embeds := named.get(f"{prefix}prompt_embeds")) is None:
            raise SchemaMismatch(
                f"A row lacks the tensor {prefix}prompt_embeds.", received=", ".join(sorted(named))
            )
        pooled, time_ids = (named.get(f"{prefix}{name}") for name in ("pooled_prompt_embeds", "add_time_ids"))
        found.append(ControlText(embeds, pooled, time_ids, guidance_scale or 0.0))
    return tuple(found)

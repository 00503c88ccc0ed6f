"""Giornata from another application, over NATS: submit edits and generations, watch and cancel them, ask for masks.

Example::

    async with giornata.client.connect("nats://127.0.0.1:4222") as client:
        edit = await client.edit(image=photo, mask=mask, prompt="a red star")
        async for progress in edit:
            print(progress)
        result = await edit
        pathlib.Path("edited.png").write_bytes(result.pictures[0].data)
"""

from giornata.client.connection import Client, connect
from giornata.client.edit import Edit, EditedPicture, EditResult, Progress
from giornata.client.mask import MaskResult, RegionMask

__all__ = ["Client", "Edit", "EditResult", "EditedPicture", "MaskResult", "Progress", "RegionMask", "connect"]

"""Edit a picture over NATS: ``python edit_over_nats.py photo.png mask.png "a red star"`` writes edited.png."""

import asyncio
import os
import sys
from pathlib import Path

from giornata.client import connect


async def main(image: bytes, mask: bytes, prompt: str) -> None:
    async with connect(os.environ["GIORNATA_NATS_URL"], api_key=os.getenv("GIORNATA_API_KEY")) as client:
        edit = await client.edit(image=image, mask=mask, prompt=prompt, padding_mask_crop=88)
        async for progress in edit:
            print(progress)
        Path("edited.png").write_bytes((await edit).pictures[0].data)


asyncio.run(main(Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]).read_bytes(), sys.argv[3]))

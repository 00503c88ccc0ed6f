"""``python -m deploy.sbom``: what each image holds, as CycloneDX's JSON, a file for each image."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import click

from deploy.sbom.contents import ROOT, ContainerImage, images, requirements

FLAT: Final = {"PYTHONWARNINGS": "ignore::UserWarning:cyclonedx.model.bom"}
"""The bill lists what is there, and not what asks for what, of which the program warns."""


def write(image: ContainerImage, folder: Path) -> Path:
    """Write the bill of an image below `folder`, valid by CycloneDX's schema; the same bytes for the same pins."""
    path = folder / f"{image.service}.cdx.json"
    pinned = "".join(f"{name}=={version}\n" for name, version in requirements(image).items())
    program = str(Path(sys.executable).with_name("cyclonedx-py"))
    project = ["--pyproject", str(image.source / "pyproject.toml")]
    flags = ["--output-format", "JSON", "--output-reproducible", "--validate", "--output-file", str(path)]
    subprocess.run(
        [program, "requirements", *project, *flags, "-"],
        input=pinned,
        text=True,
        check=True,
        env=os.environ | FLAT,
    )
    return path


@click.command("sbom", context_settings={"show_default": True})
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "out" / "sbom",
    help="Where the files go.",
)
def main(folder: Path) -> None:
    """Write what each image holds, in CycloneDX's JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in images():
        print(f"{write(image, folder)}: {len(requirements(image))} distributions")


if __name__ == "__main__":
    main()

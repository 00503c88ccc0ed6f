"""Bills of material of the images: ``python -m deploy.sbom``, which is ``make sbom``."""

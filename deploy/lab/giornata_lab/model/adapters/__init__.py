"""The adapters that ship beside fresco: two LoRAs and a ControlNet. ``python -m giornata_lab.model.train --help``."""

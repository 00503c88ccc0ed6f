"""How the built-in model was trained: ``python -m giornata_lab.model.train --help``."""

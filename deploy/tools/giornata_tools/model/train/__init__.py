"""How the built-in model was trained: ``python -m giornata_tools.model.train --help``."""

"""How the built-in model was trained: ``python -m deploy.model.train --help``."""

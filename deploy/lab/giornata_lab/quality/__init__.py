"""How good the model's edits are: fixed held-out scenes through the whole system, measured without the model."""

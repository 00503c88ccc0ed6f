"""The inputs of a block beside its tokens: template entries, corrections and recorders. Pure."""

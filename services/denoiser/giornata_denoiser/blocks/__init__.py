"""What enters a block beside its tokens: template entries, corrections and recorders. Pure."""

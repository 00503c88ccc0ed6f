"""What enters a block beside its tokens: template entries, corrections, recorders, and how they are loaded."""

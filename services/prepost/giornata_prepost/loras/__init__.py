"""Canonical files of LoRAs: read as diffusers reads them, checked against the modules of a checkpoint, written anew."""

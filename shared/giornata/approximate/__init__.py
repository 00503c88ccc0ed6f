"""The approximate prompt cache: where a row begins with another row's latent (Nirvana, NSDI '24). Pure."""

"""Getting slabs to the engine's device before blocks ask for them: the loader's thread, and a GPU's copy stream."""

"""The denoiser: rows of many jobs share one forward, joining at any step and leaving at their last.

Read in this order:

* :mod:`giornata_denoiser.row` - a picture being denoised, as a value
* :mod:`giornata_denoiser.sigmas` - its noise levels and the rule of one step
* :mod:`giornata.scheduling.batch` - which rows run next (pure)
* :mod:`giornata_denoiser.packing`, :mod:`giornata_denoiser.attention` - rows share a forward without padding
* :mod:`giornata_denoiser.families` - the transformers, over unmodified diffusers modules
* :mod:`giornata_denoiser.assembly`, :mod:`giornata_denoiser.stepping` - a batch's tensors; one step
* :mod:`giornata_denoiser.previews`, :mod:`giornata_denoiser.preview_map` - what a row looks like on its way
* :mod:`giornata_denoiser.engine` - one step for all running rows; a poisoned row fails alone
* :mod:`giornata_denoiser.loop` - the thread that owns the engine
* :mod:`giornata_denoiser.assignments`, :mod:`giornata_denoiser.carrying` - the router's rows until their report
* :mod:`giornata_denoiser.inputs`, :mod:`giornata_denoiser.outcomes` - where rows come from and go to
* :mod:`giornata_denoiser.rehearsal` - a step before the first edit
* :mod:`giornata_denoiser.service` - subscriptions and telemetry
"""

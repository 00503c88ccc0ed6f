"""The wire contract: every message, record and subject that services exchange. Pure.

Read in this order, it is the protocol's manual:

* :mod:`giornata.wire.requests` - what an application asks for
* :mod:`giornata.wire.resolution` - what a model makes of that, and of fields that a request leaves out
* :mod:`giornata.wire.jobs` - the job, what stages encode for it, and the record of its progress
* :mod:`giornata.wire.messages` - the questions services ask each other, masks from words, events of a running job
* :mod:`giornata.wire.workers` - what a service reports of itself, and the router of all
* :mod:`giornata.wire.models` - what a checkpoint is, and what computes its steps
* :mod:`giornata.wire.adapters`, :mod:`giornata.wire.loras` - LoRAs and ControlNets of jobs; the LoRA store
* :mod:`giornata.wire.controlnets` - the ControlNet service, and its data path
* :mod:`giornata.wire.templates` - pictures that are registered for reuse, and webhooks
* :mod:`giornata.wire.errors` - every way an edit can fail, with stable codes
* :mod:`giornata.wire.subjects` - where each message travels, what JetStream keeps, and who may do what there
* :mod:`giornata.wire.values` - what messages are made of: maps of cells, modes of blocks, times of stages
* :mod:`giornata.wire.codec` - how it is written down
"""

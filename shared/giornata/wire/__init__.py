"""The wire contract: every message, record and subject that services exchange. Pure.

Read in this order, it is the protocol's manual:

* :mod:`giornata.wire.requests` - what an application asks for
* :mod:`giornata.wire.defaults` - what fields stand for that a request leaves out
* :mod:`giornata.wire.jobs` - the job, and what stages measure and encode for it
* :mod:`giornata.wire.progress` - the record of a job's progress, and its rows
* :mod:`giornata.wire.messages` - the questions services ask each other
* :mod:`giornata.wire.events` - events of a running job
* :mod:`giornata.wire.workers` - what a service tells of itself, and the fleet as gateways tell it
* :mod:`giornata.wire.samplers` - what computes a row's steps
* :mod:`giornata.wire.models` - what a checkpoint is
* :mod:`giornata.wire.templates` - pictures that are registered for reuse
* :mod:`giornata.wire.errors` - every way an edit can fail, with stable codes
* :mod:`giornata.wire.subjects` - where each message travels
* :mod:`giornata.wire.stores` - what JetStream keeps
* :mod:`giornata.wire.permissions` - who may publish and subscribe what
* :mod:`giornata.wire.nats_config` - the same, as servers read it
* :mod:`giornata.wire.loras` - LoRAs: records, and the questions to the LoRA store
* :mod:`giornata.wire.masks` - masks from words
* :mod:`giornata.wire.values` - what messages are made of: maps of cells, modes of blocks, times of stages
* :mod:`giornata.wire.codec` - how it is written down
"""

"""Chaos: faults of every service and server under load, and whether every accepted edit ends exactly once.

Read in this order:

* :mod:`tests.chaos.plan` - which faults, and after how many edits; pure
* :mod:`tests.chaos.edits` - the edits, small ones, and what is to be true of their pictures; pure
* :mod:`tests.chaos.rest` and :mod:`tests.chaos.nats_door` - clients that ask again, by the same key
* :mod:`tests.chaos.load` - many edits at a time, kept in step with the faults
* :mod:`tests.chaos.relay` - a network that can be slow, and deaf or mute for one process
* :mod:`tests.chaos.faults` - what each kind of fault does
* :mod:`tests.chaos.inflict` - carries out the plan, and waits until the stack is whole again
* :mod:`tests.chaos.look` - what streams, records, blobs and processes are like
* :mod:`tests.chaos.audit` - what of all this must not be; pure
* :mod:`tests.chaos.run` and :mod:`tests.chaos.report` - a whole run, and how it is told
"""

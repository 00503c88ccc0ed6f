"""Chaos: faults of every service and server under load, and whether every accepted edit ends exactly once.

Read in this order:

* :mod:`giornata_lab.rehearsals.chaos.plan` - which faults, and after how many edits; pure
* :mod:`giornata_lab.rehearsals.chaos.edits` - the edits, small ones, and what is to be true of their pictures; pure
* :mod:`giornata_lab.rehearsals.chaos.rest` and :mod:`giornata_lab.rehearsals.chaos.nats_door` - clients that ask
  again, by the same key
* :mod:`giornata_lab.rehearsals.chaos.load` - many edits at a time, kept in step with the faults
* :mod:`giornata_lab.rehearsals.chaos.relay` - a network that can be slow, and deaf or mute for one process
* :mod:`giornata_lab.rehearsals.chaos.faults` - what each kind of fault does
* :mod:`giornata_lab.rehearsals.chaos.inflict` - carries out the plan, and waits until the stack is whole again
* :mod:`giornata_lab.rehearsals.chaos.look` - what streams, records, blobs and processes are like
* :mod:`giornata_lab.rehearsals.chaos.audit` - what of all this must not be; pure
* :mod:`giornata_lab.rehearsals.chaos.run` and :mod:`giornata_lab.rehearsals.chaos.report` - a whole run, and how it
  is told
"""

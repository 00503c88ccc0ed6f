"""The whole system on one machine: the command ``up``, and the stack that the lab and tests run on.

Read in this order:

* `models` - which checkpoints are served, and the adapters and the segmenter that ship with the trained one
* `plan` - what is started, as plain values: services, and embedded servers with their passwords
* `process` and `warden` - one child process, and its certain end
* `stack` - all of it together: start, wait until ready, kill, restart, drain
* `up` - the command
"""

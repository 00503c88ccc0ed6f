"""The whole system on one machine: the command ``up``, and the stack that the lab and tests run on.

Read in this order:

* `model`, `adapters`, `masks` and `plan` - what is asked for
* `commands` and `servers` - what is started, as plain values: services, and embedded servers with their passwords
* `process` and `warden` - one child process, and its certain end
* `watch` - what telemetry says of the processes
* `stack` - all of it together: start, wait until ready, kill, restart, drain
* `up` - the command
"""

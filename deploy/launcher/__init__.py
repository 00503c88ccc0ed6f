"""The whole system on one machine: the commands ``up`` and ``demo``, and the stack that tests run on.

Read in this order:

* :mod:`deploy.launcher.environment`, :mod:`deploy.launcher.model` and :mod:`deploy.launcher.plan` - what is asked for
* :mod:`deploy.launcher.commands` and :mod:`deploy.launcher.servers` - what is started, as plain values
* :mod:`deploy.launcher.nats` - the embedded NATS servers: one or a cluster, and their users' passwords
* :mod:`deploy.launcher.process` and :mod:`deploy.launcher.warden` - one child process, and its certain end
* :mod:`deploy.launcher.watch` - what telemetry says of the processes
* :mod:`deploy.launcher.stack` - all of it together: start, wait until ready, kill, restart, drain
* :mod:`deploy.launcher.up`, :mod:`deploy.launcher.demo` - the two commands
"""

"""The command line ``giornata``: edit a picture, start the system, look at the fleet, find what is missing.

Read in this order:

* :mod:`giornata.cli.__main__` and :mod:`giornata.cli.app` - the program and its commands
* :mod:`giornata.cli.edit` - ``edit``: with :mod:`~giornata.cli.parameters` (its options, made from the request's type),
  :mod:`~giornata.cli.outputs` (where pictures go), :mod:`~giornata.cli.edits` (what is asked and told),
  :mod:`~giornata.cli.http_door` and :mod:`~giornata.cli.nats_door` (how),
  :mod:`~giornata.cli.progress` (what is seen meanwhile) and :mod:`~giornata.cli.report` (what is left behind)
* :mod:`giornata.cli.status` - ``status``: the table of :mod:`~giornata.cli.fleet_table`
* :mod:`giornata.cli.quarantine` - ``quarantine``: what :mod:`giornata.quarantine` keeps
* :mod:`giornata.cli.up` - ``up``: the launcher of the checkout (:mod:`~giornata.cli.handing_over`)
* :mod:`giornata.cli.bench` - ``bench serve``: with :mod:`~giornata.cli.bench_serve` (its options),
  :mod:`~giornata.cli.workload_options` (those that ``simulate`` has too), :mod:`~giornata.cli.bench_values` (how they
  are read), :mod:`~giornata.cli.bench_plan` (what follows from them) and
  :mod:`~giornata.cli.bench_run` (the runs), around :mod:`giornata.loadgen`; ``bench baseline``: a server of the
  checkout, to compare with
* :mod:`giornata.cli.doctor` - ``doctor``: the checks of :mod:`giornata.cli.checks`

What these modules import beyond the services' needs is the extra ``cli`` of the distribution.
"""

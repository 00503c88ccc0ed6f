"""The command line ``giornata``: edit a picture, start the system, look at the fleet, find what is missing.

Read in this order:

* `__main__` and `app` - the program and its commands
* `edit` - ``edit``: with `parameters` (its options, made from the request's type),
  `outputs` (where pictures go), `edits` (what is asked and told),
  `http_door` and `nats_door` (how),
  `progress` (what is seen meanwhile) and `report` (what is left behind)
* `status` - ``status``: the table of `fleet_table`
* `quarantine` - ``quarantine``: what :mod:`giornata.records.quarantine` keeps
* `up` - ``up``: the launcher of the checkout (`handing_over`)
* `bench` - ``bench serve``: with `bench_serve` (its options),
  `workload_options` (those that ``simulate`` has too), `bench_values` (how they
  are read), `bench_plan` (what follows from them) and
  `bench_run` (the runs), around :mod:`giornata_tools.loadgen`; ``bench baseline``: a server of the
  checkout, to compare with
* `doctor` - ``doctor``: the checks of `checks`

What these modules import beyond the services' needs is the extra ``cli`` of the distribution.
"""

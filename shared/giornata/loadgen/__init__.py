"""The load generator of ``giornata bench serve``: edits arrive by chance, as in production, whatever the server does.

Read in this order:

* :mod:`giornata.loadgen.facts` and :mod:`giornata.loadgen.distributions` - what is known of production, and how to draw
  from it
* :mod:`giornata.loadgen.arrivals`, :mod:`giornata.loadgen.workload`, :mod:`giornata.loadgen.trace` and
  :mod:`giornata.loadgen.schedule` - which edits are asked for and when: drawn, or read from a file
* :mod:`giornata.loadgen.masks`, :mod:`giornata.loadgen.pictures` and :mod:`giornata.loadgen.material` - their files
* :mod:`giornata.loadgen.driver`, :mod:`giornata.loadgen.images_api`, :mod:`giornata.loadgen.balancing` - sends them
  when they are due, to one server or to several, and reads answers
* :mod:`giornata.loadgen.outcomes` and :mod:`giornata.loadgen.statistics` - what became of them, and its figures
* :mod:`giornata.loadgen.report`, :mod:`giornata.loadgen.plots` and :mod:`giornata.loadgen.charts` - how it is told

What these modules import beyond the services' needs is the extra ``cli`` of the distribution; facts, distributions,
arrivals and charts import nothing.
"""

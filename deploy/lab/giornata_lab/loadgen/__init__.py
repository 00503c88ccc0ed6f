"""The load generator of ``giornata bench serve``: edits arrive by chance, as in production.

Read in this order: `workload` and `traces` say which edits are asked for and when; `driver` makes their files and sends
them when they are due; `outcomes`, `report`, `charts` and `drawing` tell what became of them.
"""

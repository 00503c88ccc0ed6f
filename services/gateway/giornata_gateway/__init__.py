"""The gateway: Giornata's two doors, HTTP and NATS, with one validation and one admission behind them.

Read in this order: :mod:`~giornata_gateway.service` (what is opened), :mod:`~giornata_gateway.jobs.preparation` and
:mod:`~giornata_gateway.jobs.submission` (the path that both doors share), :mod:`~giornata_gateway.http.edits` and
:mod:`~giornata_gateway.nats.door` (the doors), then the pure modules they decide with.
"""

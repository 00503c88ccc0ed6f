"""The gateway: Giornata's two doors, HTTP and NATS, with one validation and one admission behind them.

The doors are `http` and `nats_door`; :mod:`~giornata_gateway.http.routes` lists every route. OpenAI's, A1111's and our
own requests all become an :class:`~giornata_gateway.jobs.preparation.EditOrder`, which a
:class:`~giornata_gateway.gateway.Gateway` admits in one place. Below it, `admission` lets requests in by the pure
`rules`, `jobs` prepares, submits and follows jobs, `fleet` hears telemetry, `views` are what clients are told.
:mod:`~giornata_gateway.service` opens everything.
"""

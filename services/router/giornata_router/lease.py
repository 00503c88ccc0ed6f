"""The lease that makes one router active: a key that expires unless its holder renews it."""

from __future__ import annotations

import nats.errors
import structlog
from nats.js import JetStreamContext
from nats.js.errors import Error as JetStreamError
from nats.js.kv import KeyValue

from giornata.wire.stores import LEASES

KEY = "router"

log = structlog.get_logger(__name__)


class Lease:
    """Held by one router at a time. Make it with :meth:`open`."""

    def __init__(self, bucket: KeyValue, holder: str) -> None:
        self._bucket = bucket
        self._holder = holder.encode()
        self._revision: int | None = None

    @classmethod
    async def open(cls, jetstream: JetStreamContext, holder: str) -> Lease:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(LEASES), holder)

    async def acquire(self) -> bool:
        """Take the lease if nobody holds it."""
        try:
            self._revision = await self._bucket.create(KEY, self._holder)
        except (JetStreamError, nats.errors.Error):
            return False
        return True

    async def renew(self) -> bool:
        """Hold on for another time to live; False if that is not certain."""
        try:
            self._revision = await self._bucket.update(KEY, self._holder, last=self._revision)
        except (JetStreamError, nats.errors.Error) as error:
            log.warning("lease_not_renewed", error=repr(error))
            return False
        return True

    async def release(self) -> None:
        """Give the lease up, so that the next router takes over at once instead of after the time to live."""
        if self._revision is None:
            return
        try:
            await self._bucket.delete(KEY, last=self._revision)
        except (JetStreamError, nats.errors.Error) as error:
            log.warning("lease_not_released", error=repr(error))
        self._revision = None

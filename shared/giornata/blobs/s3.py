"""A blob store on any S3-compatible object store.

An object carries its end in its metadata, and a reader takes an object whose end has passed for gone. The store's own
lifecycle rules remove it later. Clocks of all machines agree to within seconds.
"""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from giornata.blobs import UNANSWERED, BlobStore
from giornata.config import S3Address, s3_address
from giornata.wire.errors import BlobStoreFull, ServiceUnavailable
from giornata.wire.jobs import BlobRef

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, RetryConfig


_FIELDS: Final = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


def from_file(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what ``AWS_SHARED_CREDENTIALS_FILE`` holds for ``AWS_PROFILE``; nothing where no file is named.

    Variables that hold a key themselves win.

    Raises:
        ServiceUnavailable: the file cannot be read, or has no such profile.
    """
    path = environment.get("AWS_SHARED_CREDENTIALS_FILE")
    if not path or environment.get("AWS_ACCESS_KEY_ID"):
        return {}
    profile = environment.get("AWS_PROFILE") or "default"
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(Path(path).read_text(encoding="utf-8"))
        section = parser[profile]
    except OSError as error:
        message = f"AWS_SHARED_CREDENTIALS_FILE cannot be read: {error.strerror}."
        raise ServiceUnavailable(message, received=path) from error
    except (configparser.Error, KeyError, UnicodeDecodeError):
        # without its cause, which may show a line of the file
        message = "AWS_SHARED_CREDENTIALS_FILE is no file of credentials, or lacks the profile."
        raise ServiceUnavailable(message, received=f"{path}, profile {profile}") from None
    return {name: section[field] for field, name in _FIELDS.items() if field in section}


THREADS: Final = 32
"""Requests of one process at a time."""
END: Final = "giornata-end"
"""The metadata that says when an object ends, in seconds since 1970."""
SLACK: Final = 1 / 32
"""A renewal writes an object again, and so gives it this part more time: the next renewals then find it long enough."""
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_STATUS: Final = re.compile(r"non-2xx status code: (\d+)")
_FULL: Final = {
    "QuotaExceeded",
    "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded",
    "InsufficientCapacity",
}

T = TypeVar("T")


class S3Blobs(BlobStore):
    """Objects below a prefix of a bucket. Make it with :meth:`open`.

    obstore's coroutines may abort the interpreter at its exit (decision record 0027 counts it); its blocking calls in
    threads that this store owns do not.
    """

    def __init__(self, store: S3Store, threads: ThreadPoolExecutor, bucket: str) -> None:
        self._store, self._threads, self._bucket = store, threads, bucket

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, timeout_s: float = 20) -> AsyncIterator[S3Blobs]:
        """Use ``s3://bucket/prefix?endpoint=…&region=…``; ServiceUnavailable if it does not let us in.

        A request is tried again for about seven seconds if its connection fails or the store has an error of its own.
        A request that is not answered within `timeout_s` is not tried again.
        """
        address = s3_address(url)
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="s3")
        try:
            store = cls(_client(address, timeout_s), threads, address.bucket)
            await store.ping()
            yield store
        finally:
            await asyncio.to_thread(threads.shutdown)

    async def store(self, key: str, data: bytes, ttl_s: int) -> None:
        await self._ask(self._write, key, data, time.time() + ttl_s)

    async def read(self, key: str) -> bytes | None:
        return await self._ask(self._read, key)

    async def has(self, ref: BlobRef) -> bool:
        return await self._ask(self._end_of, ref.key) is not None

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        return await self._ask(self._extend, ref.key, time.time(), ttl_s)

    async def remove(self, keys: set[str]) -> None:
        paths = sorted(filter(_is_path, keys))
        if paths:
            await self._ask(self._store.delete, paths)

    async def ping(self) -> None:
        await self._ask(self._read, "ping")

    async def _ask(self, call: Callable[..., T], *args: object) -> T:
        """A blocking call in a thread, with errors of the client as errors of the tree."""

        def called() -> T:
            with _answering(self._bucket):
                return call(*args)

        return await asyncio.get_running_loop().run_in_executor(self._threads, called)

    def _write(self, key: str, data: bytes, end_s: float) -> None:
        try:
            self._store.put(key, data, attributes={END: f"{end_s:.3f}"}, use_multipart=False)
        except BaseError as error:
            status, code = _answer(error)
            # 500 is what SeaweedFS says when no volume has room, after every try
            if code in _FULL or status in {500, 507}:
                raise BlobStoreFull(
                    "The object store does not take another object; it may be full.",
                    received=f"{len(data)} bytes, answered with {status} {code}",
                    retry_after_s=10,
                ) from None
            raise

    def _find(self, key: str, *, head: bool = False) -> GetResult | None:
        """What lies under `key`; None if there is nothing, it is not of this store, or its time is over."""
        if not _is_path(key):
            return None
        try:
            found = self._store.get(key, options={"head": head})
        except FileNotFoundError as error:
            if _answer(error)[1] == "NoSuchBucket":
                raise
            return None
        end = found.attributes.get(END)
        return None if end is None or float(end) <= time.time() else found

    def _read(self, key: str) -> bytes | None:
        found = self._find(key)
        return None if found is None else bytes(found.bytes())

    def _end_of(self, key: str) -> float | None:
        """Return when an object ends; None if there is none, or its time is over."""
        found = self._find(key, head=True)
        return None if found is None else float(found.attributes[END])

    def _extend(self, key: str, now_s: float, ttl_s: int) -> bool:
        """S3 changes an object's metadata by a write alone."""
        end_s = self._end_of(key)
        if end_s is None:
            return False
        if now_s + ttl_s <= end_s <= now_s + ttl_s * (1 + 2 * SLACK):
            return True
        data = self._read(key)
        if data is None:
            return False
        self._write(key, data, now_s + ttl_s * (1 + SLACK))
        return True


def _client(address: S3Address, timeout_s: float) -> S3Store:
    limit = timedelta(seconds=timeout_s)
    client: ClientConfig = {
        "allow_http": (address.endpoint or "").startswith("http://"),
        "timeout": limit,
        "connect_timeout": limit,
    }
    retry: RetryConfig = {
        "max_retries": 10,
        "retry_timeout": limit,
        "backoff": {
            "init_backoff": timedelta(seconds=0.05),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }
    settings = from_file(os.environ)
    settings |= {"endpoint": address.endpoint} if address.endpoint else {}
    settings |= {"region": address.region} if address.region else {}
    return S3Store(
        address.bucket,
        prefix=address.prefix or None,
        client_options=client,
        retry_config=retry,
        **settings,  # type: ignore[arg-type]  # a typed dictionary whose keys these are
    )


def _is_path(key: str) -> bool:
    """Return whether an object may have such a name; a client's claim check may name any."""
    return all(part not in {"", ".", ".."} for part in key.split("/"))


def _answer(error: Exception) -> tuple[int | None, str]:
    """Status and code that the store answered with. The rest of the text may tell of the credentials."""
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    return int(status[1]) if status else None, code[1] if code else "no code"


@contextmanager
def _answering(bucket: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        message = f"The object store has no bucket {bucket}; is GIORNATA_BLOBS_URL right?"
        raise ServiceUnavailable(message, retry_after_s=2) from None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        message = f"The object store does not let us in ({_answer(error)[1]}); are the AWS credentials right?"
        raise ServiceUnavailable(message, retry_after_s=2) from None
    except BaseError as error:
        status, code = _answer(error)
        received = None if status is None else f"{status} {code}"
        raise ServiceUnavailable(UNANSWERED, received=received, retry_after_s=2) from None

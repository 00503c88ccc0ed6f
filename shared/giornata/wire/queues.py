"""What a router tells of the jobs that wait, of what steps cost, and of JetStream's room."""

from __future__ import annotations

from giornata.wire.values import WireModel


class CostFit(WireModel):
    """A worker's linear cost model; see :mod:`giornata.planning.costs`."""

    weights: tuple[float, ...]
    """ms per unit; of computing, by :data:`giornata.planning.operations.NETWORK`."""
    adapting: tuple[float, ...] = ()
    """By :data:`giornata.planning.operations.ADAPTING`; empty of loads, and from versions without adapters."""
    r2: float
    """Over the worker's latest samples; the first fit's, while they are too few."""
    residual_ms: float
    """Median of absolute residuals over the same samples."""
    samples: int
    """Samples used since the start."""
    outliers: int
    """Samples left out since the start."""


class ModelDeviceCosts(WireModel):
    """The router's regressions for all workers of one model and device."""

    model_digest: str
    device: str
    compute: CostFit
    load: CostFit


class QueueState(WireModel):
    """Telemetry of the active router: the jobs that wait for a worker."""

    jobs: int = 0
    """Jobs that no worker has taken: in the queue, and prepared."""
    rows: int = 0
    steps: int = 0
    full: bool = False
    """As many jobs of a priority are accepted as may be: more of them are refused."""
    unreadable: int = 0
    """Messages in the work queue that this router cannot read."""
    wait_ms: float | None = None
    """Time until the denoising of one more picture would begin. None: unknown, since no worker's speed is, or several
    models are served.
    """
    costs: tuple[ModelDeviceCosts, ...] = ()


class StoreRoom(WireModel):
    """How full one of JetStream's streams is."""

    store: str
    """The stream's name."""
    used_bytes: int
    limit_bytes: int

    @property
    def nearly_full(self) -> bool:
        """Whether an operator should look at it: it holds four fifths of what it may."""
        return 5 * self.used_bytes >= 4 * self.limit_bytes

"""The embeddings of one key that are most alike.

Up to :data:`PRODUCT` of them are a matrix, compared by one product. What comes beyond that goes into a graph
(`usearch`, HNSW), which answers in logarithmic time and takes removals. With each that comes, one of the matrix goes
there, too, so that nothing is ever built at once, and in the end the graph holds all. Where `usearch` is not installed,
the matrix grows instead, and a look-up takes 0.07 ms for each thousand.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Embedding = npt.NDArray[np.float32]
"""(numbers,), of length 1."""

PRODUCT: Final = 2_000
SOUGHT: Final = 32
"""Candidates that the graph follows: half of `usearch`'s own; the nearest one is missed once in a hundred times."""
_FIRST: Final = 8


class Alike(NamedTuple):
    """An embedding that is near."""

    number: int
    """As it was added."""
    cosine: float


class _Matrix:
    """Rows of a matrix; those of removed embeddings are used again."""

    def __init__(self, numbers: int) -> None:
        self._rows = np.zeros((_FIRST, numbers), np.float32)
        self._of = np.full(_FIRST, -1, np.int64)
        self._places: dict[int, int] = {}
        self._free = list(range(_FIRST))[::-1]

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def add(self, number: int, embedding: Embedding) -> None:
        if not self._free:
            held = len(self._rows)
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
            self._of = np.concatenate((self._of, np.full(held, -1, np.int64)))
            self._free = list(range(held, 2 * held))[::-1]
        place = self._places[number] = self._free.pop()
        self._rows[place], self._of[place] = embedding, number

    def remove(self, number: int) -> None:
        place = self._places.pop(number)
        self._rows[place], self._of[place] = 0, -1
        self._free.append(place)

    def take(self) -> tuple[int, Embedding]:
        """Take out the oldest embedding; its number, and the embedding."""
        number, place = next(iter(self._places.items()))
        embedding = self._rows[place].copy()
        self.remove(number)
        return number, embedding

    def nearest(self, embedding: Embedding, count: int) -> list[Alike]:
        if not self._places:
            return []
        cosines = self._rows @ embedding
        cosines[self._of < 0] = -np.inf
        count = min(count, len(self._places))
        best = np.argpartition(cosines, -count)[-count:]
        return [Alike(int(self._of[place]), float(cosines[place])) for place in best]


def _graph(numbers: int) -> Any | None:
    """An empty index of `usearch`; None where it is not installed."""
    try:
        from usearch.index import Index  # noqa: PLC0415 - an extra of the router, for large keys alone
    except ImportError:
        return None
    return Index(ndim=numbers, metric="ip", dtype="f16", expansion_search=SOUGHT)


class Nearest:
    """Embeddings of `numbers` numbers by number; `product` of them are compared by a matrix product."""

    def __init__(self, numbers: int, product: int = PRODUCT) -> None:
        self.numbers, self._product = numbers, product
        self._matrix = _Matrix(numbers)
        self._index: Any | None = None
        self._tried = False
        """Whether an index was asked for, which may not be installed."""

    def __len__(self) -> int:
        return len(self._matrix) + (0 if self._index is None else len(self._index))

    def add(self, number: int, embedding: Embedding) -> None:
        """Add an embedding under a number that none has.

        Raises:
            ValueError: it has another size than the others.
        """
        if embedding.shape != (self.numbers,):
            raise ValueError(f"received an embedding of shape {embedding.shape}; accepted: ({self.numbers},)")
        if len(self._matrix) >= self._product and not self._tried:
            self._tried, self._index = True, _graph(self.numbers)
        if self._index is None:
            self._matrix.add(number, embedding)
            return
        self._index.add(number, embedding, threads=1)
        if len(self._matrix):
            self._index.add(*self._matrix.take(), threads=1)
            if not len(self._matrix):
                self._matrix = _Matrix(self.numbers)

    def remove(self, number: int) -> None:
        """Remove an embedding that was added."""
        if number in self._matrix:
            self._matrix.remove(number)
        elif self._index is not None:
            self._index.remove(number)

    def nearest(self, embedding: Embedding, count: int) -> list[Alike]:
        """The `count` most alike ones, or all; the most alike first, of equally alike ones the oldest."""
        if embedding.shape != (self.numbers,):
            return []
        found = self._matrix.nearest(embedding, count)
        if self._index is not None and len(self._index):
            hits = self._index.search(embedding, count, threads=1)
            pairs = zip(hits.keys, hits.distances, strict=True)
            found += [Alike(int(number), 1.0 - float(distance)) for number, distance in pairs]
        return sorted(found, key=lambda each: (-each.cosine, each.number))[:count]

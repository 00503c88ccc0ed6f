"""A worker obeys the router that has taken the lease last."""

from __future__ import annotations

from giornata.wire.messages import Epoch
from giornata_denoiser.attempts.epochs import EpochFence


def test_a_lower_epoch_is_refused_once_a_higher_one_was_heard_of() -> None:
    epochs = EpochFence()
    assert epochs.admits(Epoch(5, 7))
    assert epochs.admits(Epoch(5, 7))
    assert epochs.admits(Epoch(5, 9))
    assert not epochs.admits(Epoch(5, 7))
    assert not epochs.admits(Epoch(4, 100)), "of an earlier store"
    assert epochs.admits(None), "a router of an older version is obeyed"
    assert epochs.admits(Epoch(5, 9))


def test_in_a_store_that_was_made_anew_revisions_begin_again() -> None:
    epochs = EpochFence()
    assert epochs.admits(Epoch(5, 700))
    assert epochs.admits(Epoch(6, 1))
    assert not epochs.admits(Epoch(5, 701))

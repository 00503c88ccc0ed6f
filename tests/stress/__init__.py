"""The stress run, ``make test-stress``: tests again and again on a machine that is busy, and stands still at times."""

"""``giornata doctor``: each check is a function that returns a finding, see :mod:`.finding`."""

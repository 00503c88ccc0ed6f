"""``giornata simulate-pool``: a pool of devices on a virtual clock."""

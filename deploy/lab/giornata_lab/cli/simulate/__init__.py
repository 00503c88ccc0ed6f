"""``giornata simulate``: a cluster on a virtual clock."""

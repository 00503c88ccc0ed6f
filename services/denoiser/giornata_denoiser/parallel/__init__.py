"""A batch that several processes compute: their groups, and families whose networks a group computes."""

"""The page of what composes, made of the table that the composition tests hold to."""

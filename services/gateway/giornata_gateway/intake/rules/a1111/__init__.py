"""Requests of A1111's API, as parameters of Giornata's own jobs. Pure."""

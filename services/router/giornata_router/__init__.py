"""The router: accepts jobs durably and walks each from inspection to picture.

Pure: :mod:`policy`, :mod:`placement`, :mod:`transitions`. Edge: :mod:`service` and what it composes.
"""

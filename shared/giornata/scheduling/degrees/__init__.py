"""Degrees: which devices of a pool compute which rows' next steps, so that most rows end in time.

TetriServe (section 4) chooses the degree of sequence parallelism of every request anew in rounds. Here a choice is made
at every arrival and at every end of a step. Pure.
"""

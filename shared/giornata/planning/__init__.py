"""The pipeline planner: which blocks of a step use the template cache, so that loading hides behind computing.

Pure, and shared by who computes (the denoiser) and who predicts (the router). Times are milliseconds; loads are counted
in slabs, the unit in which the loader moves bytes, so that plans have few states.
"""

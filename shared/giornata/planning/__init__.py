"""The pipeline planner: which blocks of a step use the template cache, so that loading hides behind computing.

The denoiser plans with it, the router and the simulator predict. Pure. Times are milliseconds; loads are counted
in slabs, the unit in which the loader moves bytes, so that plans have few states.
"""

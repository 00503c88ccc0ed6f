"""Planning: what a step computes and costs, and which of its blocks take from the template cache. Pure.

The denoiser plans with it, the router and the simulator predict.
"""

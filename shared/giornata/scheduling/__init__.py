"""Who runs where and in which order: batching, load, finish times, policies and the line of those who wait.

The router and the simulator drive the same code; the denoiser has its batch from here. Nothing here reads a clock:
`now` is an argument, in seconds of any monotonic clock. Pure.
"""

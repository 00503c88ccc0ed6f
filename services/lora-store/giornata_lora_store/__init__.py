"""The LoRA store: keeps adapters on disk, checks what they are, and gives them to the services that need them.

`files` and `host_tier` touch the disk, `endpoints` answers, `validation` reads headers and has prepost normalise.
"""

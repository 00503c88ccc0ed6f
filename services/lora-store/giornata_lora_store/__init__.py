"""The LoRA store: keeps adapters on disk, checks what they are, and gives them to the services that need them.

`rules` decides, `files` and `header_reading` touch the disk, `intake` answers, `validation` has prepost normalise.
"""

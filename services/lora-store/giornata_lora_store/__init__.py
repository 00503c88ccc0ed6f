"""The LoRA store: keeps adapters on disk, checks what they are, and gives them to the services that need them.

`rules` decides, `files` and `header_reader` touch the disk, `endpoints` answers, `validation` has prepost normalise.
"""

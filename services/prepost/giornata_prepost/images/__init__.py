"""The image work, free of torch, run in a pool of processes: two stages and what they are made of. Pure."""

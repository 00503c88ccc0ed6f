"""What serves in benchmarks: whole systems, in this process or as processes, and what is asked of them."""

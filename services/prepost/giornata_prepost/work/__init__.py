"""Where the work runs: pictures in a pool of processes, the model in one thread. The event loop stays free."""

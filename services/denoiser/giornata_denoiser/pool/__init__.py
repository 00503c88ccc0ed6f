"""A worker of several devices: a leader that decides and holds rows, and a rank process for each device."""

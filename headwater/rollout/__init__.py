"""An engine in a world, once: tasks in, trajectories out."""

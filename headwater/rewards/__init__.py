"""Whatever can say something about the trajectories of a group, as signals."""

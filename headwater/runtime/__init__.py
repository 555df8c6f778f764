"""The loop, its stream, the learner, checkpoints and the run folder: all that knows processes and files."""

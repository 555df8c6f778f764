"""Programs that compare an answer with the right one."""

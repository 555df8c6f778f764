"""From files, hub ids and generators to tasks; and from tasks to the tokens that a policy reads."""

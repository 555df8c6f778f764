"""How good a policy is, with the uncertainty of saying so."""

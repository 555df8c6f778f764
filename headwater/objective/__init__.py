"""Log-probs and advantages in, loss per token out. Pure."""

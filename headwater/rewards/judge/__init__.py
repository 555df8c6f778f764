"""Language models as judges: who is asked, what they are shown, and what counts as a verdict."""

"""Audits: what is measured of a judge, with a verdict for each bias, and the page that says so."""

"""Verbs that look at runs, files and machines. Nothing else in embodrl imports them."""

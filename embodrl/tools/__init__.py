"""Verbs that inspect runs, files and machines. Nothing else in embodrl imports them."""

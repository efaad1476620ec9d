"""A package of somebody else: one part of each kind that embodrl takes from outside, with settings of its own."""

"""Saves without collectives: what the ranks of one save tell each other, through the store alone."""

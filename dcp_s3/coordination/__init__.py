"""Saves without collectives: the protocol, and the objects by which the ranks meet."""

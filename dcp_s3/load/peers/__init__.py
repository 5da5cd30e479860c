"""Ranks of one load that need the same bytes: they agree, share the work, and exchange what they fetched."""

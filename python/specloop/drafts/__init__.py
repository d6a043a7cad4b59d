"""Drafts: what guesses the next tokens. ``base`` is the protocol, one file per kind."""

"""Drafts made for a target: prompts, text that the target writes itself, and the training."""

"""Readers of model files, bounds-checked: a malformed file raises FormatError and nothing else."""

"""Figures of a replay, from its records."""

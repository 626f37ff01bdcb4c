"""Workloads, replay and reports."""

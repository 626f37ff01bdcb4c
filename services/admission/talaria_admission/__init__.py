"""Admission: the session table, leases, and the one account of load."""

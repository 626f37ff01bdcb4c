"""The host KV registry of a node."""

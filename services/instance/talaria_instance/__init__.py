"""The instance service: one GPU group, its rounds and slots, its engine."""

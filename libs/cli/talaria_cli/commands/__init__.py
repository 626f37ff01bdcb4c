"""The subcommands: each module has `add(subparsers)` and `run(args)`."""

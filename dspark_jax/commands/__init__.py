"""The command line, one file a command. Nothing of jax is imported before a command runs."""

"""The command line: build objects from config and arguments, with one module per command."""

"""The command line: config and arguments to objects, one module for each command."""

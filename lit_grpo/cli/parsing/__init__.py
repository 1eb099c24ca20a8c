"""Turn arguments and config files into a checked config, with errors that a user can act on."""

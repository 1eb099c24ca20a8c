"""From arguments and config files to a checked config, with errors that a user can act on."""

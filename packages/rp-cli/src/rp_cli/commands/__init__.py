"""What each subcommand does."""

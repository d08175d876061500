"""The options of all commands: declared once, and read from the command line and from YAML."""

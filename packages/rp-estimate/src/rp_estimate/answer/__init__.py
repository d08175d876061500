"""What is foretold, for people and for programs: a screen of text, ten lines of it, or a line of JSON."""

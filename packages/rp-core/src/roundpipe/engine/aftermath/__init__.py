"""What calls and steps may leave behind: late errors, and states in which a model refuses to go on."""

"""Text from models that were trained: a conversation in the terminal, and completions of a file of prompts."""

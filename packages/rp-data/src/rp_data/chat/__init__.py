"""Conversations: their chat template, its text, and which of it the assistant says."""

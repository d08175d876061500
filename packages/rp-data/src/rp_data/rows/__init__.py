"""Rows of files of all formats, and the samples that they are."""

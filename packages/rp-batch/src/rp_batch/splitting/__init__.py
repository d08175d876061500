"""Splitting: inferring the batch of a tree and cutting it into parts."""

"""`roundpipe plan`: its options, and the request that they make."""

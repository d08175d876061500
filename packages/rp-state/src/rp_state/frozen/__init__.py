"""Frozen weights in files: written once, mapped for whoever reads them on the host, read for each upload."""

"""Working state in files: blocks, read ahead in a step's order and written behind, striped over directories."""

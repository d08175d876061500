"""How a part's calls are divided: shapes propose, and values decide."""

"""One idea of what to compare in each file: its two sides, and the rows that come of them."""

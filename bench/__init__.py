"""How fast and how lean: ours and other libraries on the same work, side by side. `make bench`."""

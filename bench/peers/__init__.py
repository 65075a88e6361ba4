"""Other libraries doing the work of bench.cases. Each file is imported in an environment of its own, see bench.environments."""

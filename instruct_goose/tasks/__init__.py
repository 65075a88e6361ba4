"Tasks whose answers are known: film reviews, the exact world, probes, invariances."

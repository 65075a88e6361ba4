"Language models: policy with a value head, reward model, sampling, adapters, sharding."

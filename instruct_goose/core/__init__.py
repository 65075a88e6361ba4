"What every layer needs and nothing of ours: checks, files, processes, random generators, state."
